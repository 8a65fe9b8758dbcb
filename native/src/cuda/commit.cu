// accept_commit and kv_move: what follows a verify, in one launch each.
#include "host.h"

namespace eyas {
namespace {

__global__ void commit_kernel(const int32_t *predicts, const int32_t *accept_index, const int32_t *accept_token_num,
                              const int64_t *out_cache_loc, int nodes, int max_accept, int32_t *accept_lens, int64_t *tokens,
                              int64_t *src_loc, int64_t *tgt_loc, int64_t *rows, int64_t *bonus) {
  const int b = blockIdx.x, count = accept_token_num[b] + 1;
  if (threadIdx.x == 0) accept_lens[b] = count;
  for (int i = threadIdx.x; i < max_accept; i += blockDim.x) {
    const int64_t at = (int64_t)b * max_accept + i;
    const bool used = i < count;
    const int64_t node = used ? accept_index[at] : -1;
    const int64_t token = used ? predicts[node] : -1;
    tokens[at] = token;
    rows[at] = node;
    src_loc[at] = used ? out_cache_loc[node] : -1;
    tgt_loc[at] = used ? out_cache_loc[(int64_t)b * nodes + i] : -1;
    if (i == count - 1) bonus[b] = token;
  }
}

// A thread carries its own 16-byte columns through all slots of a request, so no other thread can overwrite what it still has to read.
__global__ void move_kernel(const uint64_t *buffers, const int64_t *slot_bytes, const int64_t *tgt, const int64_t *src, int count) {
  constexpr int kAtOnce = 8;
  char *base = (char *)buffers[blockIdx.x];
  const int64_t bytes = slot_bytes[blockIdx.x];
  tgt += (int64_t)blockIdx.y * count;
  src += (int64_t)blockIdx.y * count;
  for (int64_t column = 16 * (int64_t)(blockIdx.z * blockDim.x + threadIdx.x); column < bytes;
       column += 16 * (int64_t)(gridDim.z * blockDim.x)) {
    for (int first = 0; first < count; first += kAtOnce) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < count && src[first + i] >= 0) x[i] = *(const uint4 *)(base + src[first + i] * bytes + column);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < count && src[first + i] >= 0 && tgt[first + i] >= 0 && tgt[first + i] != src[first + i])
          *(uint4 *)(base + tgt[first + i] * bytes + column) = x[i];
    }
  }
}

}  // namespace
}  // namespace eyas

extern "C" int eyas_accept_commit(const int32_t *predicts, const int32_t *accept_index, const int32_t *accept_token_num,
                                  const int64_t *out_cache_loc, int batch, int nodes, int max_accept, int32_t *accept_lens,
                                  int64_t *tokens, int64_t *src_loc, int64_t *tgt_loc, int64_t *rows, int64_t *bonus,
                                  void *stream) {
  if (batch < 1) return EYAS_BAD_BATCH;
  if (nodes < 1 || nodes > 256) return EYAS_BAD_TREE;
  if (max_accept < 1 || max_accept > nodes) return EYAS_BAD_TOPK;
  if (!predicts || !accept_index || !accept_token_num || !out_cache_loc || !accept_lens || !tokens || !src_loc || !tgt_loc ||
      !rows || !bonus)
    return EYAS_BAD_POINTER;
  eyas::commit_kernel<<<batch, 32, 0, (cudaStream_t)stream>>>(predicts, accept_index, accept_token_num, out_cache_loc, nodes,
                                                              max_accept, accept_lens, tokens, src_loc, tgt_loc, rows, bonus);
  return (int)cudaGetLastError();
}

extern "C" int eyas_kv_move(const uint64_t *buffers, const int64_t *slot_bytes, int num_buffers, const int64_t *tgt_loc,
                            const int64_t *src_loc, int batch, int per_request, void *stream) {
  if (num_buffers < 1 || batch < 1 || batch > 65535 || per_request < 0) return EYAS_BAD_BATCH;
  if (!buffers || !slot_bytes || !tgt_loc || !src_loc) return EYAS_BAD_POINTER;
  if (per_request == 0) return 0;
  eyas::move_kernel<<<dim3(num_buffers, batch, 2), 128, 0, (cudaStream_t)stream>>>(buffers, slot_bytes, tgt_loc, src_loc, per_request);
  return (int)cudaGetLastError();
}

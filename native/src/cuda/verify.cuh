// What the verifications share: the tree in shared memory, checks, and the draw of the token that ends a path.
#pragma once
#include "eyas/cuda_api.h"

namespace eyas {

constexpr int kMaxNodes = 256;

struct Tree {
  int32_t next[kMaxNodes], sibling[kMaxNodes];
  int64_t token[kMaxNodes], id[kMaxNodes];
};

__device__ __forceinline__ void load_tree(Tree &t, const eyas_verify &v) {
  const int64_t base = (int64_t)blockIdx.x * v.nodes;
  for (int i = threadIdx.x; i < v.nodes; i += blockDim.x) {
    t.next[i] = (int)v.retrive_next_token[base + i];
    t.sibling[i] = (int)v.retrive_next_sibling[base + i];
    t.token[i] = v.candidates[base + i];
    t.id[i] = v.retrive_index[base + i];
  }
  for (int i = threadIdx.x; i < v.max_accept; i += blockDim.x) v.accept_index[(int64_t)blockIdx.x * v.max_accept + i] = -1;
  __syncthreads();
}

constexpr int kSampleThreads = 1024, kSampleWarps = kSampleThreads / 32, kPerWarp = 128;
constexpr int kMaxPieces = 4096;  // 128-entry pieces of a vocabulary row whose sums are kept: 524,288 tokens

// Draws predicts[id] in proportion to weight(token), called by every thread of a block of kSampleThreads.
template <class Weight> __device__ void draw(const eyas_verify &v, int64_t id, Weight weight) {
  __shared__ float piece[kMaxPieces];
  __shared__ int chosen;
  __shared__ float rest;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pieces = (int)((v.vocab + kPerWarp - 1) / kPerWarp);
  for (int k = warp; k < pieces; k += kSampleWarps) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPerWarp / 32; ++i) {
      const int64_t token = (int64_t)k * kPerWarp + i * 32 + lane;
      if (token < v.vocab) sum += weight(token);
    }
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (lane == 0) piece[k] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {  // the piece in which the running sum passes coin * total
    float total = 0.f;
    for (int k = 0; k < pieces; ++k) total += piece[k];
    const float u = v.uniform_final[blockIdx.x] * total;
    float before = 0.f;
    int k = 0, last_used = 0;
    for (; k < pieces && before + piece[k] <= u; ++k) {
      if (piece[k] > 0.f) last_used = k;
      before += piece[k];
    }
    chosen = k < pieces ? k : last_used;
    rest = k < pieces ? u - before : INFINITY;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.f;
  int64_t token = (int64_t)chosen * kPerWarp, last_used = token;
  const int64_t end = min(token + kPerWarp, v.vocab);
  for (; token < end; ++token) {
    const float w = weight(token);
    if (w > 0.f) last_used = token;
    sum += w;
    if (sum > rest) break;
  }
  v.predicts[id] = (int32_t)last_used;
}

inline int check(const eyas_verify *v) {
  if (!v) return EYAS_BAD_POINTER;
  if (v->struct_size != sizeof(eyas_verify)) return EYAS_BAD_STRUCT;
  if (v->batch < 1) return EYAS_BAD_BATCH;
  if (v->nodes < 1 || v->nodes > kMaxNodes) return EYAS_BAD_TREE;
  if (v->max_accept < 1) return EYAS_BAD_TOPK;
  if (!v->candidates || !v->retrive_index || !v->retrive_next_token || !v->retrive_next_sibling || !v->predicts ||
      !v->accept_index || !v->accept_token_num)
    return EYAS_BAD_POINTER;
  return 0;
}

inline int check_sampling(const eyas_verify *v) {
  if (!v->uniform || !v->uniform_final || !v->target_probs) return EYAS_BAD_POINTER;
  return v->vocab < 1 || v->vocab > (int64_t)kMaxPieces * kPerWarp ? EYAS_BAD_TOPK : 0;
}

}  // namespace eyas

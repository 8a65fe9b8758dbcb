// verify_greedy and verify_target_only: which path of the draft tree the target accepts. One block per request.
#include "host.h"

namespace eyas {
namespace {

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

__global__ void greedy_kernel(const __grid_constant__ eyas_verify v) {
  __shared__ Tree t;
  __shared__ int64_t wanted[kMaxNodes];
  for (int i = threadIdx.x; i < v.nodes; i += blockDim.x) wanted[i] = v.target_predict[(int64_t)blockIdx.x * v.nodes + i];
  load_tree(t, v);
  if (threadIdx.x) return;
  int32_t *accepted = v.accept_index + (int64_t)blockIdx.x * v.max_accept;
  int last = 0, count = 0;
  accepted[0] = (int32_t)t.id[0];
  while (count + 1 < v.max_accept) {
    int child = t.next[last];
    while (child >= 0 && t.token[child] != wanted[last]) child = t.sibling[child];
    if (child < 0) break;
    v.predicts[t.id[last]] = (int32_t)wanted[last];
    accepted[++count] = (int32_t)t.id[child];
    last = child;
  }
  v.accept_token_num[blockIdx.x] = count;
  v.predicts[t.id[last]] = (int32_t)wanted[last];
}

constexpr int kSampleThreads = 1024, kSampleWarps = kSampleThreads / 32, kPerWarp = 128;
constexpr int kMaxPieces = 4096;  // 128-entry pieces of a vocabulary row whose sums are kept: 524,288 tokens

struct Sampled {
  int last, count, rejected;
  int64_t excluded[kMaxNodes];
};

// Walks the tree as SGLang's target-only rule does. Tokens tried and refused at the last node are listed: they have no
// share in the final draw.
__device__ void walk_target_only(const eyas_verify &v, const Tree &t, Sampled &s) {
  const int64_t base = (int64_t)blockIdx.x * v.nodes;
  int32_t *accepted = v.accept_index + (int64_t)blockIdx.x * v.max_accept;
  const float bar = fmaxf(v.threshold_acc, 1e-9f);
  s.last = s.count = s.rejected = 0;
  accepted[0] = (int32_t)t.id[0];
  float coin = v.uniform[base];
  while (s.count + 1 < v.max_accept) {
    const float *probs = v.target_probs + (base + s.last) * v.vocab;
    float sum = 0.f;
    int child = t.next[s.last];
    s.rejected = 0;
    for (; child >= 0; child = t.sibling[child]) {
      const float p = probs[t.token[child]];
      sum += p;
      if (coin <= sum / bar || p >= v.threshold_single) break;
      if (s.rejected < kMaxNodes) s.excluded[s.rejected++] = t.token[child];
    }
    if (child < 0) break;
    s.rejected = 0;
    v.predicts[t.id[s.last]] = (int32_t)t.token[child];
    accepted[++s.count] = (int32_t)t.id[child];
    s.last = child;
    coin = v.uniform[base + child];
  }
  v.accept_token_num[blockIdx.x] = s.count;
}

__device__ __forceinline__ float weight(const Sampled &s, const float *probs, int64_t token) {
  const float p = probs[token];
  for (int i = 0; i < s.rejected; ++i)
    if (s.excluded[i] == token) return 0.f;
  return fmaxf(p, 0.f);
}

__global__ void __launch_bounds__(kSampleThreads) target_only_kernel(const __grid_constant__ eyas_verify v) {
  __shared__ Tree t;
  __shared__ Sampled s;
  __shared__ float piece[kMaxPieces];
  __shared__ int chosen;
  __shared__ float rest;
  load_tree(t, v);
  if (threadIdx.x == 0) walk_target_only(v, t, s);
  __syncthreads();
  const float *probs = v.target_probs + ((int64_t)blockIdx.x * v.nodes + s.last) * v.vocab;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pieces = (int)((v.vocab + kPerWarp - 1) / kPerWarp);
  for (int k = warp; k < pieces; k += kSampleWarps) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPerWarp / 32; ++i) {
      const int64_t token = (int64_t)k * kPerWarp + i * 32 + lane;
      if (token < v.vocab) sum += weight(s, probs, token);
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
    const float w = weight(s, probs, token);
    if (w > 0.f) last_used = token;
    sum += w;
    if (sum > rest) break;
  }
  v.predicts[t.id[s.last]] = (int32_t)last_used;
}

int check(const eyas_verify *v) {
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

}  // namespace
}  // namespace eyas

extern "C" int eyas_verify_greedy(const eyas_verify *v) {
  using namespace eyas;
  const int e = check(v);
  if (e) return e;
  if (!v->target_predict) return EYAS_BAD_POINTER;
  greedy_kernel<<<v->batch, 128, 0, (cudaStream_t)v->stream>>>(*v);
  return (int)cudaGetLastError();
}

extern "C" int eyas_verify_target_only(const eyas_verify *v) {
  using namespace eyas;
  const int e = check(v);
  if (e) return e;
  if (!v->uniform || !v->uniform_final || !v->target_probs) return EYAS_BAD_POINTER;
  if (v->vocab < 1 || v->vocab > (int64_t)kMaxPieces * kPerWarp) return EYAS_BAD_TOPK;
  target_only_kernel<<<v->batch, kSampleThreads, 0, (cudaStream_t)v->stream>>>(*v);
  return (int)cudaGetLastError();
}

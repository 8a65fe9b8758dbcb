// verify_greedy and verify_target_only: which path of the draft tree the target accepts. One block per request.
#include "host.h"
#include "verify.cuh"

namespace eyas {
namespace {

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
  load_tree(t, v);
  if (threadIdx.x == 0) walk_target_only(v, t, s);
  __syncthreads();
  const float *probs = v.target_probs + ((int64_t)blockIdx.x * v.nodes + s.last) * v.vocab;
  draw(v, t.id[s.last], [&](int64_t token) { return weight(s, probs, token); });
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
  const int sampling = check_sampling(v);
  if (sampling) return sampling;
  target_only_kernel<<<v->batch, kSampleThreads, 0, (cudaStream_t)v->stream>>>(*v);
  return (int)cudaGetLastError();
}

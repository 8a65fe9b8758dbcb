// verify_rejection: multi-round speculative sampling (SpecInfer, Miao et al. 2023, algorithm 2) over a draft tree. One
// block per request. What is left of the target's distribution after some refusals is computed anew for each token from
// the refusals' few numbers, so nothing of the vocabulary's size is stored.
#pragma once
#include "verify.cuh"

namespace eyas {

// The refusals at one node. After refusal k, p becomes max(p - q_k, 0) / left[k]; q_k is the draft's distribution, or,
// without replacement, the part of it that the tokens refused before leave, divided by share[k]. That share is summed over
// the tokens that are left, never one minus the others': of a draft that is sure of a token nothing would remain in f32.
struct Refusals {
  int count;
  float left[kMaxNodes], share[kMaxNodes];
  int64_t token[kMaxNodes];
};

struct Pair {
  float p, q;  // the target's and the draft's, as they stand after all refusals
};

__device__ __forceinline__ Pair remaining(const Refusals &r, bool replacement, const float *target, const float *draft,
                                          int64_t token) {
  float p = fmaxf(target[token], 0.f);
  const float whole = fmaxf(draft[token], 0.f);
  bool refused = false;
  for (int k = 0;; ++k) {
    const float q = replacement ? whole : refused || r.share[k] <= 0.f ? 0.f : whole / r.share[k];
    if (k == r.count) return {p, q};
    if (r.left[k] > 0.f) p = fmaxf(p - q, 0.f) / r.left[k];
    refused |= r.token[k] == token;
  }
}

__device__ float block_sum(float value) {
  __shared__ float part[kSampleWarps];
  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(0xffffffffu, value, i);
  __syncthreads();  // the last call's parts have been read
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < kSampleWarps; ++i) sum += part[i];
  return sum;
}

// The child of `node` that is accepted, or -1. Every thread of the block calls it and gets the same answer.
__device__ int accept_child(const eyas_verify &v, const Tree &t, int node, Refusals &r) {
  const int64_t base = (int64_t)blockIdx.x * v.nodes;
  const float *target = v.target_probs + (base + node) * v.vocab, *draft = v.draft_probs + (base + node) * v.vocab;
  if (threadIdx.x == 0) r.count = 0, r.share[0] = 1.f;
  __syncthreads();
  for (int child = t.next[node]; child >= 0; child = t.sibling[child]) {
    const int64_t x = t.token[child];
    const Pair at = remaining(r, v.replacement, target, draft, x);
    if (v.uniform[base + child] * at.q < at.p) return child;
    float left = 0.f, share = 0.f;
    for (int64_t token = threadIdx.x; token < v.vocab; token += blockDim.x) {
      const Pair here = remaining(r, v.replacement, target, draft, token);
      left += fmaxf(here.p - here.q, 0.f);
      share += token == x ? 0.f : here.q;  // 0 for what was refused before
    }
    left = block_sum(left);
    if (!v.replacement) share = block_sum(share);
    if (threadIdx.x == 0) {
      const int k = r.count++;
      r.left[k] = left;
      r.token[k] = x;
      if (k + 1 < kMaxNodes) r.share[k + 1] = r.share[k] * share;
    }
    __syncthreads();
  }
  return -1;
}

__global__ void __launch_bounds__(kSampleThreads) rejection_kernel(const __grid_constant__ eyas_verify v) {
  __shared__ Tree t;
  __shared__ Refusals r;
  load_tree(t, v);
  int32_t *accepted = v.accept_index + (int64_t)blockIdx.x * v.max_accept;
  int node = 0, count = 0;
  if (threadIdx.x == 0) accepted[0] = (int32_t)t.id[0], r.count = 0, r.share[0] = 1.f;
  __syncthreads();
  while (count + 1 < v.max_accept) {
    const int child = accept_child(v, t, node, r);
    if (child < 0) break;
    ++count;
    __syncthreads();  // every thread has read the refusals
    if (threadIdx.x == 0) {
      v.predicts[t.id[node]] = (int32_t)t.token[child];
      accepted[count] = (int32_t)t.id[child];
      r.count = 0;
    }
    node = child;
    __syncthreads();
  }
  if (threadIdx.x == 0) v.accept_token_num[blockIdx.x] = count;
  const int64_t row = ((int64_t)blockIdx.x * v.nodes + node) * v.vocab;
  draw(v, t.id[node], [&](int64_t token) {
    return remaining(r, v.replacement, v.target_probs + row, v.draft_probs + row, token).p;
  });
}

}  // namespace eyas

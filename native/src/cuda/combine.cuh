// The kernel that merges the partial results of a launch's splits by their log-sum-exp.
#pragma once
#include "attention.cuh"

namespace eyas {

__device__ __forceinline__ float warp_max(float x) {
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// One warp per query, head and 128 components, 4 neighbouring ones per lane. The first splits' results are asked for before
// their weights are known: the two latencies then pass together.
template <class T, int D> __global__ void __launch_bounds__(256) combine_kernel(const __grid_constant__ AttnParams p, int tile) {
  constexpr int kPieces = (D + 127) / 128, kAtOnce = 16;
  const eyas_attn &a = p.a;
  const int64_t rows = (int64_t)a.batch * a.max_tree * a.num_q_heads, item = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  const int64_t row = item / kPieces;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32, c = (int)(item % kPieces) * 128 + 4 * lane;
  const bool used = D % 128 == 0 || c < D;
  const int h = row % a.num_q_heads, t = row / a.num_q_heads % a.max_tree, b = row / a.num_q_heads / a.max_tree;
  const Request r = load_request(a, b);
  if (t >= r.num_queries) return;
  const int active = split_span(a, r, tile, 0).active;
  wait_previous();

  const uint2 *src = (const uint2 *)(p.part_out + row * D + c);
  const int64_t step = rows * D / 4;
  uint2 x[kAtOnce];
#pragma unroll
  for (int s = 0; s < kAtOnce; ++s) x[s] = used && s < active ? src[s * step] : make_uint2(0, 0);

  float2 mine = make_float2(-INFINITY, 0.f);  // split `lane`; beyond 32 splits they are read again
  if (lane < active) mine = p.part_stat[lane * rows + row];
  float top = mine.x;
  for (int s = lane + 32; s < active; s += 32) top = fmaxf(top, p.part_stat[s * rows + row].x);
  top = warp_max(top);
  const float ref = top == -INFINITY ? 0.f : top;
  float total = exp2f(mine.x - ref);
  for (int s = lane + 32; s < active; s += 32) total += exp2f(p.part_stat[s * rows + row].x - ref);
  total = warp_sum(total);

  float acc[4] = {};
  for (int first = 0; first < active; first += kAtOnce) {
    if (first) {
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) x[s] = used && first + s < active ? src[(first + s) * step] : make_uint2(0, 0);
    }
    if (first % 32 == 0 && first) mine = first + lane < active ? p.part_stat[(first + lane) * rows + row] : make_float2(-INFINITY, 0.f);
    const float weight = exp2f(mine.x - ref) * mine.y;
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      const float w = __shfl_sync(0xffffffffu, weight, first % 32 + s);
      const float2 lo = Math<Fp16>::unpack(x[s].x), hi = Math<Fp16>::unpack(x[s].y);
      acc[0] += w * lo.x, acc[1] += w * lo.y, acc[2] += w * hi.x, acc[3] += w * hi.y;
    }
  }
  const float f = total > 0.f ? a.v_scale / total : 0.f;
  if (used) {
    uint32_t *out = (uint32_t *)((uint16_t *)a.out + (r.first_query + t) * a.out_stride_token + h * a.out_stride_head + c);
    out[0] = Math<T>::pack(acc[0] * f, acc[1] * f);
    out[1] = Math<T>::pack(acc[2] * f, acc[3] * f);
  }
  if (a.lse && lane == 0 && c == 0)
    a.lse[(int64_t)(r.first_query + t) * a.num_q_heads + h] = total > 0.f ? (ref + log2f(total)) * kLn2 : -INFINITY;
}

}  // namespace eyas

// The GQA kernel's frame: set a block up, walk the keys, merge the groups, write results or partial results.
#pragma once
#include "tree_attn_gqa.cuh"

namespace eyas {

// Two neighbouring components of row i: pair n of tile-row i >> 1. Where they are in the accumulators, and in the output,
// depends on how values were delivered (see add_values).
template <bool E4M3, int MI, int NT>
__device__ __forceinline__ float2 output_pair(const float (&o)[MI][NT][4], int i, int n) {
  const int mi = i >> 1, h = 2 * (i & 1);
  if constexpr (!E4M3) return make_float2(o[mi][n][h], o[mi][n][h + 1]);
  else return make_float2(o[mi][n & ~1][h + (n & 1)], o[mi][n | 1][h + (n & 1)]);
}
template <bool E4M3> __device__ __forceinline__ int output_column(int n, int lane) {
  if constexpr (!E4M3) return n * 8 + 2 * (lane & 3);
  else return (n >> 1) * 16 + 4 * (lane & 3) + 2 * (n & 1);
}

// Sums the groups' accumulators into group 0's. Each thread of a group holds the same rows and columns as its peer.
template <class Tile, class Block> __device__ __forceinline__ void merge_groups(Block &w, int groups, char *smem) {
  constexpr int kVectors = Tile::MI * Tile::D / 8, kRows = 2 * Tile::MI, GT = Tile::GT;
  __syncthreads();  // every group is done with its stages
  float4 *buffer = (float4 *)smem;
  float *stats = (float *)(smem + (groups - 1) * GT * kVectors * 16);
  if (w.group > 0) {
    float4 *mine = buffer + (w.group - 1) * kVectors * GT + w.gtid;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float *x = w.o[i / (Tile::D / 8)][i % (Tile::D / 8)];
      mine[i * GT] = make_float4(x[0], x[1], x[2], x[3]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float *s = stats + ((w.group - 1) * 2 * kRows + 2 * i) * GT + w.gtid;
      s[0] = w.ref[i];
      s[GT] = w.sum[i];
    }
  }
  __syncthreads();
  if (w.group > 0) return;
  for (int g = 0; g < groups - 1; ++g) {
    float mine[kRows], theirs[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float *s = stats + (g * 2 * kRows + 2 * i) * GT + w.gtid;
      const float now = fmaxf(w.ref[i], s[0]);
      mine[i] = exp2_fast(w.ref[i] - now);
      theirs[i] = exp2_fast(s[0] - now);
      w.sum[i] = w.sum[i] * mine[i] + s[GT] * theirs[i];
      w.ref[i] = now;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int mi = i / (Tile::D / 8);
      float *x = w.o[mi][i % (Tile::D / 8)];
      const float4 y = buffer[(g * kVectors + i) * GT + w.gtid];
      x[0] = x[0] * mine[2 * mi] + y.x * theirs[2 * mi];
      x[1] = x[1] * mine[2 * mi] + y.y * theirs[2 * mi];
      x[2] = x[2] * mine[2 * mi + 1] + y.z * theirs[2 * mi + 1];
      x[3] = x[3] * mine[2 * mi + 1] + y.w * theirs[2 * mi + 1];
    }
  }
}

template <class T, bool E4M3, class Tile, class Block>
__device__ __forceinline__ void store_rows(const Block &w, bool whole, int split) {
  constexpr int NT = Tile::D / 8;
  const eyas_attn &a = w.a;
  const Request r = load_request(a, blockIdx.z);
  const int per = a.num_q_heads / a.num_kv_heads, rows = r.num_queries * per;
  const int head = blockIdx.x;
#pragma unroll
  for (int i = 0; i < 2 * Tile::MI; ++i) {
    const float total = quad_sum(w.sum[i]);
    const int row = w.row_of(i);
    const float inv = total > 0.f ? 1.f / total : 0.f;
    const float lse2 = total > 0.f ? w.ref[i] + log2f(total) : -INFINITY;
    float largest = 0.f;
    if (!whole) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 x = output_pair<E4M3>(w.o, i, n);
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
      largest = quad_max(largest) * inv;
    }
    if (row >= rows) continue;
    const int t = row / per, h = head * per + row % per;
    if (whole) {
      const float f = inv * a.v_scale;
      uint16_t *out = (uint16_t *)a.out + (r.first_query + t) * a.out_stride_token + h * a.out_stride_head;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 x = output_pair<E4M3>(w.o, i, n);
        *(uint32_t *)(out + output_column<E4M3>(n, w.lane)) = Math<T>::pack(x.x * f, x.y * f);
      }
      if (a.lse && (w.lane & 3) == 0) a.lse[(int64_t)(r.first_query + t) * a.num_q_heads + h] = lse2 * kLn2;
    } else {
      const int64_t at = ((int64_t)split * a.batch + blockIdx.z) * a.max_tree * a.num_q_heads + (int64_t)t * a.num_q_heads + h;
      const float f = largest > 0.f ? inv / largest : 0.f;
      __half *out = w.p.part_out + at * Tile::D;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 x = output_pair<E4M3>(w.o, i, n);
        *(uint32_t *)(out + output_column<E4M3>(n, w.lane)) = Math<Fp16>::pack(x.x * f, x.y * f);
      }
      if ((w.lane & 3) == 0) w.p.part_stat[at] = make_float2(lse2, largest);
    }
  }
}

template <class T, bool E4M3, class Tile>
__global__ void __launch_bounds__(256, 1) gqa_kernel(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) char smem[];
  using Block = GqaBlock<T, E4M3, Tile>;
  Block w(p);
  const eyas_attn &a = p.a;
  const int groups = blockDim.x / Tile::GT, stages = a.stages, per = a.num_q_heads / a.num_kv_heads;
  const int row_tiles = (a.max_tree * per + Tile::BM - 1) / Tile::BM, split = blockIdx.y / row_tiles;
  const Request r = load_request(a, blockIdx.z);
  allow_next();
  w.row0 = (blockIdx.y - split * row_tiles) * Tile::BM;
  if (w.row0 >= r.num_queries * per) return;
  const Span span = split_span(a, r, Tile::BN, split);
  if (span.count <= 0) return;

  w.kv_len = r.kv_len;
  w.mask_from = r.prefix;
  w.mask_below = a.window > 0 ? r.kv_len - a.window : 0;
  w.lane = threadIdx.x % 32;
  w.group = threadIdx.x / Tile::GT;
  w.gtid = threadIdx.x % Tile::GT;
  w.warp = w.gtid / 32;
  w.index = request_index(a, blockIdx.z);
  w.q_smem = smem_address(smem);
  w.stage_smem = w.q_smem + Tile::Q_BYTES + w.group * stages * Tile::STAGE;
  w.ring = (int64_t *)(smem + Tile::Q_BYTES + groups * stages * Tile::STAGE) + w.group * stages * Tile::BN;
  const int r8 = w.lane & 7, b3 = (w.lane >> 3) & 1, b4 = w.lane >> 4;
  w.value_lane = Tile::KeyRows::offset(b3 * 8 + r8, b4);
  w.key_lane = E4M3 ? w.value_lane : Tile::KeyRows::offset(b4 * 8 + r8, b3);
#pragma unroll
  for (int i = 0; i < 2 * Tile::MI; ++i) w.ref[i] = kNoMax, w.sum[i] = 0.f;
#pragma unroll
  for (int i = 0; i < Tile::MI * Tile::D / 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) w.o[i / (Tile::D / 8)][i % (Tile::D / 8)][e] = 0.f;

#pragma unroll 1
  for (int i = w.gtid; i < stages * Tile::BN; i += Tile::GT) {
    const int pos = (span.first + w.group + i / Tile::BN * groups) * Tile::BN + i % Tile::BN;
    w.ring[i] = w.ring_entry(pos < w.kv_len ? w.index[index_entry(a, pos)] : 0, pos);
  }
  prefetch_index(a, w.index, span.first * Tile::BN, min(w.kv_len, (span.first + span.count) * Tile::BN));
  w.load_queries(smem, r, blockIdx.x);
  copy_commit();
  __syncthreads();
  w.walk(span, groups, stages);
  if (groups > 1) merge_groups<Tile>(w, groups, smem);
  if (w.group == 0) store_rows<T, E4M3, Tile>(w, a.num_splits == 1, split);
}

}  // namespace eyas

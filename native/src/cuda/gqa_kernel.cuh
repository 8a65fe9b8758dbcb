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

// Which group ends up with tile-row mi of the rows: two groups share the work where there are two.
__device__ __forceinline__ int owner_of(int mi, int groups) { return min(mi, groups - 1); }

// Sums the groups' accumulators into their owners'. Each thread of a group holds the same rows and columns as its peers.
template <class Tile, class Block> __device__ __forceinline__ void merge_groups(Block &w, int groups, char *smem) {
  constexpr int MI = Tile::MI, NT = Tile::D / 8, GT = Tile::GT;
  // A group with a tile less than the first passes its barrier once more, so that all have passed the same number of named
  // barriers when they meet at the block's. Nothing needs that but racecheck, which reports correct code without it.
  if (w.group >= w.state->full_groups) group_barrier(1 + w.group, GT);
  __syncthreads();  // every group is done with its stages
  float4 *buffer = (float4 *)smem;                                       // [mi][sender][n][thread]
  float2 *stats = (float2 *)(smem + (groups - 1) * GT * MI * NT * 16);  // [mi][sender][half][thread]: reference, sum
#pragma unroll
  for (int mi = 0; mi < MI; ++mi) {
    const int owner = owner_of(mi, groups), sender = mi * (groups - 1) + w.group - (w.group > owner);
    if (w.group == owner) continue;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float *x = w.o[mi][n];
      buffer[(sender * NT + n) * GT + w.gtid] = make_float4(x[0], x[1], x[2], x[3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) stats[(sender * 2 + h) * GT + w.gtid] = make_float2(w.ref[2 * mi + h], w.sum[2 * mi + h]);
  }
  __syncthreads();
#pragma unroll
  for (int mi = 0; mi < MI; ++mi) {
    if (w.group != owner_of(mi, groups)) continue;
#pragma unroll 1
    for (int sender = mi * (groups - 1); sender < (mi + 1) * (groups - 1); ++sender) {
      float mine[2], theirs[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 s = stats[(sender * 2 + h) * GT + w.gtid];
        const float now = fmaxf(w.ref[2 * mi + h], s.x);
        mine[h] = exp2_fast(w.ref[2 * mi + h] - now);
        theirs[h] = exp2_fast(s.x - now);
        w.sum[2 * mi + h] = w.sum[2 * mi + h] * mine[h] + s.y * theirs[h];
        w.ref[2 * mi + h] = now;
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float *x = w.o[mi][n];
        const float4 y = buffer[(sender * NT + n) * GT + w.gtid];
        x[0] = x[0] * mine[0] + y.x * theirs[0];
        x[1] = x[1] * mine[0] + y.y * theirs[0];
        x[2] = x[2] * mine[1] + y.z * theirs[1];
        x[3] = x[3] * mine[1] + y.w * theirs[1];
      }
    }
  }
}

template <class T, bool E4M3, class Tile, class Block>
__device__ __forceinline__ void store_rows(const Block &w, int groups, int split) {
  constexpr int NT = Tile::D / 8;
  const eyas_attn &a = w.a;
  const Request r = load_request(a, blockIdx.z);
  const int per = a.num_q_heads / a.num_kv_heads, rows = r.num_queries * per;
#pragma unroll
  for (int i = 0; i < 2 * Tile::MI; ++i) {
    if (w.group != owner_of(i >> 1, groups)) continue;
    const float total = quad_sum(w.sum[i]);
    const int row = w.row_of(i);
    const float inv = total > 0.f ? __fdividef(1.f, total) : 0.f;
    const float lse2 = total > 0.f ? w.ref[i] + log2f(total) : -INFINITY;
    const int t = row / per, h = blockIdx.x * per + row - t * per;
    if (a.num_splits == 1) {
      if (row >= rows) continue;
      const float f = inv * a.v_scale;
      uint16_t *out = (uint16_t *)a.out + (r.first_query + t) * a.out_stride_token + h * a.out_stride_head;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 x = output_pair<E4M3>(w.o, i, n);
        *(uint32_t *)(out + output_column<E4M3>(n, w.lane)) = Math<T>::pack(x.x * f, x.y * f);
      }
      if (a.lse && (w.lane & 3) == 0) a.lse[(int64_t)(r.first_query + t) * a.num_q_heads + h] = lse2 * kLn2;
      continue;
    }
    float largest = 0.f;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 x = output_pair<E4M3>(w.o, i, n);
      largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
    largest = quad_max(largest);
    if (row >= rows) continue;
    const int64_t at = (((int64_t)split * a.batch + blockIdx.z) * a.max_tree + t) * a.num_q_heads + h;
    const float f = largest > 0.f ? 1.f / largest : 0.f;
    __half *out = w.p.part_out + at * Tile::D;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 x = output_pair<E4M3>(w.o, i, n);
      *(uint32_t *)(out + output_column<E4M3>(n, w.lane)) = Math<Fp16>::pack(x.x * f, x.y * f);
    }
    if ((w.lane & 3) == 0) w.p.part_stat[at] = make_float2(lse2, largest * inv);
  }
}

template <class T, bool E4M3, class Tile>
__global__ void __launch_bounds__(256, 1) gqa_kernel(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) char smem[];
  GqaBlock<T, E4M3, Tile> w(p);
  const eyas_attn &a = p.a;
  const int groups = blockDim.x / Tile::GT, stages = a.stages, per = a.num_q_heads / a.num_kv_heads;
  const int row_tiles = (a.max_tree * per + Tile::BM - 1) / Tile::BM, split = blockIdx.y / row_tiles;
  const Request r = load_request(a, blockIdx.z);
  const int row0 = (blockIdx.y - split * row_tiles) * Tile::BM;
  if (row0 >= r.num_queries * per) return;
  const Span span = split_span(a, r, Tile::BN, split);
  if (span.count <= 0) {
    if (a.num_splits == 1)
      store_nothing<Tile::D>(a, r, row0, min(row0 + Tile::BM, r.num_queries * per), per, blockIdx.x * per);
    return;
  }

  const Place<Tile> at;
  const int32_t *index = request_index(a, blockIdx.z);
  char *queries = smem + Tile::HEAD;
  w.state = (BlockState *)smem;
  w.q_smem = smem_address(queries);
  w.stage_smem = w.q_smem + Tile::Q_BYTES + at.group * stages * Tile::STAGE;
  w.ring = (int64_t *)(queries + Tile::Q_BYTES + groups * stages * Tile::STAGE) + at.group * stages * Tile::BN;
  const int r8 = at.lane & 7, b3 = (at.lane >> 3) & 1, b4 = at.lane >> 4;
  w.query_at = w.q_smem + Tile::QueryRows::offset(at.warp * Tile::MI * 16 + (at.lane & 15), b4);
  w.value_lane = Tile::KeyRows::offset(b3 * 8 + r8, b4);
  w.key_lane = E4M3 ? w.value_lane : Tile::KeyRows::offset(b4 * 8 + r8, b3);
#pragma unroll
  for (int i = 0; i < 2 * Tile::MI; ++i) w.ref[i] = kNoMax, w.sum[i] = 0.f;
#pragma unroll
  for (int i = 0; i < Tile::MI * Tile::D / 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) w.o[i / (Tile::D / 8)][i % (Tile::D / 8)][e] = 0.f;

  // The first tiles' index entries are asked for before anything else: keys can only be copied once they are there.
  constexpr int kEntries = (3 * Tile::BN + Tile::GT - 1) / Tile::GT;
  const int end = min(r.kv_len, (span.first + span.count) * Tile::BN);
  int entry[kEntries];
  auto position = [&](int i) { return (span.first + at.group + i / Tile::BN * groups) * Tile::BN + i % Tile::BN; };
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    const int pos = position(at.gtid + e * Tile::GT);
    entry[e] = pos < end ? index[index_entry(a, pos)] : 0;
  }
  w.load_queries(r, row0, blockIdx.x);
  copy_commit();
  if (threadIdx.x == 0) {
    const int over = span.count % groups;
    *(BlockState *)smem = {index, r, end, a.window > 0 ? r.kv_len - a.window : 0, row0, split, over ? over : groups};
  }
  prefetch_index(a, index, span.first * Tile::BN, end);
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    const int i = at.gtid + e * Tile::GT;
    if (i < stages * Tile::BN) w.ring[i] = w.ring_entry(entry[e], position(i));
  }
  __syncthreads();
  w.walk(span, groups, stages, queries);
  allow_next();
  if (groups > 1) merge_groups<Tile>(w, groups, queries);
  store_rows<T, E4M3, Tile>(w, groups, w.state->split);
}

}  // namespace eyas

// The MLA kernel's frame: set a block up, walk the keys, add up the rows' denominators, write results or partial results.
#pragma once
#include "gqa_kernel.cuh"
#include "mla_walk.cuh"

namespace eyas {

template <class T, bool E4M3, class Tile, class Block>
__device__ __forceinline__ void store_mla(Block &w, bool whole, int split) {
  const eyas_attn &a = w.a;
  const Request r = load_request(a, blockIdx.z);
  const int rows = r.num_queries * a.num_q_heads, row = w.rows4 * 32 + (w.lane >> 2);
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float part = quad_sum(w.sum[h]);
    if ((w.lane & 3) == 0) w.row_stat[(row + w.own_mi() * 16 + h * 8) * 4 + w.own_slot()] = part;
  }
  __syncthreads();
  float total[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    total[i] = 0.f;
#pragma unroll
    for (int s = 0; s < Tile::SLOTS; ++s) total[i] += w.row_stat[(row + i * 8) * 4 + s];
  }
  float largest[4] = {};
  if (!whole) {  // of a whole row: the 4 warps' columns together
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const float2 x = output_pair<E4M3>(w.o, i, n);
        largest[i] = fmaxf(largest[i], fmaxf(fabsf(x.x), fabsf(x.y)));
      }
      largest[i] = quad_max(largest[i]);
      if ((w.lane & 3) == 0) w.row_stat[(row + i * 8) * 4 + w.warp] = largest[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = *(const float4 *)(w.row_stat + (row + i * 8) * 4);
      largest[i] = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int g = blockIdx.x * Tile::BM + row + i * 8;
    if (g >= rows) continue;
    const int t = g / a.num_q_heads, h = g % a.num_q_heads;
    const float inv = total[i] > 0.f ? 1.f / total[i] : 0.f;
    const float lse2 = total[i] > 0.f ? w.row_ref[row + i * 8] + log2f(total[i]) : -INFINITY;
    const bool first = w.warp == 0 && (w.lane & 3) == 0;
    if (whole) {
      const float f = inv * a.v_scale;
      uint16_t *out = (uint16_t *)a.out + (r.first_query + t) * a.out_stride_token + h * a.out_stride_head + w.warp * 128;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const float2 x = output_pair<E4M3>(w.o, i, n);
        *(uint32_t *)(out + output_column<E4M3>(n, w.lane)) = Math<T>::pack(x.x * f, x.y * f);
      }
      if (a.lse && first) a.lse[(int64_t)(r.first_query + t) * a.num_q_heads + h] = lse2 * kLn2;
    } else {
      const int64_t at = (((int64_t)split * a.batch + blockIdx.z) * a.max_tree + t) * a.num_q_heads + h;
      const float f = largest[i] > 0.f ? 1.f / largest[i] : 0.f;
      __half *out = w.p.part_out + at * Tile::DV + w.warp * 128;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const float2 x = output_pair<E4M3>(w.o, i, n);
        *(uint32_t *)(out + output_column<E4M3>(n, w.lane)) = Math<Fp16>::pack(x.x * f, x.y * f);
      }
      if (first) w.p.part_stat[at] = make_float2(lse2, largest[i] * inv);
    }
  }
}

template <class T, bool E4M3, class Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1) mla_kernel(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) char smem[];
  MlaBlock<T, E4M3, Tile> w(p);
  const eyas_attn &a = p.a;
  const int stages = a.stages;
  const Request r = load_request(a, blockIdx.z);
  allow_next();
  const int row0 = blockIdx.x * Tile::BM, rows = r.num_queries * a.num_q_heads;
  if (row0 >= rows) return;
  const Span span = split_span(a, r, Tile::BN, blockIdx.y);
  if (span.count <= 0) {
    if (a.num_splits == 1) store_nothing<Tile::DV>(a, r, row0, min(row0 + Tile::BM, rows), a.num_q_heads, 0);
    return;
  }

  w.kv_len = r.kv_len;
  w.mask_from = r.prefix;
  w.mask_below = a.window > 0 ? r.kv_len - a.window : 0;
  w.lane = threadIdx.x % 32;
  w.rows4 = threadIdx.x / 128;
  w.warp = threadIdx.x / 32 % 4;
  w.ts = w.warp / Tile::KS;
  w.ks = w.warp % Tile::KS;
  w.index = request_index(a, blockIdx.z);
  char *at = smem + Tile::Q_BYTES;
  w.stage_smem = smem_address(at);
  at += stages * Tile::STAGE;
  w.p_smem = smem_address(at);
  at += Tile::P_BYTES;
  w.exchange = (float4 *)at;
  w.exchange_smem = smem_address(at);
  at += Tile::X_BYTES;
  w.row_ref = (float *)at;
  w.row_stat = w.row_ref + Tile::BM;
  w.flag = (volatile int *)(w.row_stat + 4 * Tile::BM);
  at += Tile::STAT_BYTES;
  w.ring = (int64_t *)at;

  const int r8 = w.lane & 7, b3 = (w.lane >> 3) & 1, b4 = w.lane >> 4;
  w.query_at = smem_address(smem) + Tile::QueryRows::offset(w.rows4 * 32 + (w.lane & 15), 2 * w.ks + b4);
  w.weight_at = Tile::IN_PLACE
                    ? w.exchange_smem + w.rows4 * Tile::TS * Tile::KS * Tile::X_BLOCK + Tile::WeightRows::offset(w.lane & 15, b4)
                    : w.p_smem + Tile::WeightRows::offset(w.rows4 * 32 + (w.lane & 15), b4);
  w.key_lane = E4M3 ? Tile::KeyRows::offset(w.ts * Tile::TW + (w.lane >> 3) * 8 + r8, w.ks)
                    : Tile::KeyRows::offset(w.ts * Tile::TW + b4 * 8 + r8, 2 * w.ks + b3);
  w.value_lane = Tile::KeyRows::offset(b3 * 8 + r8, b4) + w.warp * (E4M3 ? 128 : 256);

  for (int i = threadIdx.x; i < Tile::BM; i += Tile::THREADS) w.row_ref[i] = kNoMax;
  if (threadIdx.x < Tile::R) w.flag[threadIdx.x] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < stages * Tile::BN; i += Tile::THREADS) {
    const int pos = span.first * Tile::BN + i;
    w.ring[i] = w.ring_entry(pos < w.kv_len ? w.index[index_entry(a, pos)] : 0, pos);
  }
  prefetch_index(a, w.index, span.first * Tile::BN, min(w.kv_len, (span.first + span.count) * Tile::BN));
#pragma unroll
  for (int i = 0; i < 128; ++i) w.o[i / 64][i / 4 % 16][i % 4] = 0.f;
#pragma unroll
  for (int h = 0; h < 2; ++h) w.ref[h] = kNoMax, w.sum[h] = 0.f;
  w.load_queries(smem, r);
  copy_commit();
  __syncthreads();
  start_walk(w, span, stages, smem);
  if constexpr (Tile::R == 2) walk_apart(w, span, stages);
  else walk_together(w, span, stages);
  store_mla<T, E4M3, Tile>(w, a.num_splits == 1, blockIdx.y);
}

}  // namespace eyas

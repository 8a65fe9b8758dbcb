// The lean GQA kernel's frame: as gqa_kernel.cuh, whose merge and results it shares.
#pragma once
#include "gqa_kernel.cuh"
#include "lean_gqa.cuh"

namespace eyas {

template <class T, bool E4M3, class Tile>
__global__ void __launch_bounds__(256, 1) lean_gqa_kernel(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) char smem[];
  LeanBlock<T, E4M3, Tile> w(p);
  const eyas_attn &a = p.a;
  const int groups = blockDim.x / Tile::GT, stages = a.stages, per = a.num_q_heads / a.num_kv_heads;
  const int row_tiles = (a.max_tree * per + Tile::BM - 1) / Tile::BM, split = blockIdx.y / row_tiles;
  const Request r = load_request(a, blockIdx.z);
  const int row0 = (blockIdx.y - split * row_tiles) * Tile::BM;
  if (row0 >= r.num_queries * per) return;
  const Span span = even_span(a, r, Tile::BN, split);
  if (span.count <= 0) return;

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
  if (threadIdx.x == 0) *(BlockState *)smem = {index, r, end, a.window > 0 ? r.kv_len - a.window : 0, row0, split};
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

// How an MLA block goes through its tiles of keys: with one row group plainly, with two a phase apart.
#pragma once
#include "tree_attn_mla.cuh"

namespace eyas {

// Starts the copies of the first tiles; the queries' are under way.
template <class T, bool E4M3, class Tile>
__device__ __forceinline__ void start_walk(MlaBlock<T, E4M3, Tile> &w, const Span &span, int stages, char *queries) {
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) {
    if (i < span.count) w.issue(i);
    copy_commit();
  }
  if (!E4M3) return;
  if (stages == 2) copy_wait<1>();
  else copy_wait<2>();
  w.reorder_queries(queries);
}

// The key of the tile after those in flight that this thread keeps the ring entry of, and its index entry, which is asked for now
// and used after the tile's work.
struct Later {
  bool any;
  int key, entry;
  template <class Block> __device__ __forceinline__ Later(const Block &w, const Span &span, int i, int stages) {
    any = threadIdx.x < Block::BN && i + stages < span.count;
    key = (span.first + i + stages) * Block::BN + threadIdx.x;
    entry = any && key < w.kv_len ? w.index[index_entry(w.a, key)] : 0;
  }
  template <class Block> __device__ __forceinline__ void keep(const Block &w, int stage) const {
    if (any) w.ring[stage * Block::BN + threadIdx.x] = w.ring_entry(entry, key);
  }
};

template <class T, bool E4M3, class Tile>
__device__ __forceinline__ void walk_together(MlaBlock<T, E4M3, Tile> &w, const Span &span, int stages) {
  int stage = 0, ahead = stages - 1;
#pragma unroll 1
  for (int i = 0; i < span.count; ++i) {
    copy_wait_oldest(stages);
    __syncthreads();
    if (i + stages - 1 < span.count) w.issue(ahead);
    copy_commit();
    const Later later(w, span, i, stages);
    const uint32_t base = w.stage_smem + stage * Tile::STAGE;
    {
      float own[Tile::UNITS][4];
      {
        float s[2][Tile::NT][4];
        w.partial_scores(s, base);
        w.exchange_scores(s, own);
      }
      w.mask_and_soften(own, (span.first + i) * Tile::BN);
    }
    w.add_values(base);
    later.keep(w, stage);
    ahead = stage;
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
}

// The second row group runs a phase behind: it adds tile i - 1's values while the first one scores tile i, then scores tile i while
// the first one softens. So one group's exchanges and exponentials pass under the other's products.
template <class T, bool E4M3, class Tile>
__device__ __forceinline__ void walk_apart(MlaBlock<T, E4M3, Tile> &w, const Span &span, int stages) {
  const bool late = w.rows4 == 1;
  int stage = 0, ahead = stages - 1;
#pragma unroll 1
  for (int i = 0; i < span.count; ++i) {
    copy_wait_oldest(stages);
    __syncthreads();
    const Later later(w, span, i, stages);
    const uint32_t base = w.stage_smem + stage * Tile::STAGE;
    {
      float own[Tile::UNITS][4];
      {
        float s[2][Tile::NT][4];
        if (late) {
          if (i > 0) w.add_values(w.stage_smem + ahead * Tile::STAGE);
        } else {
          w.partial_scores(s, base);
        }
        __syncthreads();  // the stage of tile i - 1 is free
        if (i + stages - 1 < span.count) w.issue(ahead);
        copy_commit();
        if (late) w.partial_scores(s, base);
        w.exchange_scores(s, own);
      }
      w.mask_and_soften(own, (span.first + i) * Tile::BN);
    }
    if (!late) w.add_values(base);
    later.keep(w, stage);
    ahead = stage;
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  if (late) w.add_values(w.stage_smem + ahead * Tile::STAGE);
}

}  // namespace eyas

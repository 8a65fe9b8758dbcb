// Grouped-query attention of a draft tree over a paged cache: the block. Registers are what it has too few of, so:
//
// - what a block shares is in shared memory, and a thread's place is read again where it is needed: queries fit in registers then;
// - the copies of a later tile are started under the first products of a tile, and the first fragments of what follows the check
//   of the reference are asked for before it, because nothing moves over a branch by itself;
// - e4m3 is widened to fp16, by the hardware from 8.9 on;
// - at the tree, only the keys that exist are gone through, and only those at the tree are masked.
#pragma once
#include "attention.cuh"

namespace eyas {

// What all threads of a block share and need a few times per tile at most: in shared memory, because registers are what the
// kernels have too few of.
struct BlockState {
  const int32_t *index;
  Request request;
  int end;         // first key that is not this split's
  int mask_below;  // keys below it, and in the tree, are not visible to every query
  int row0, split;
  int full_groups;  // groups from here on have a tile less than those before
  __device__ __forceinline__ bool needs_mask(int key, int keys) const { return key + keys > request.prefix || key < mask_below; }
};

// Rows are packed: a row is (node, head of the KV group). A group of WR warps holds BM = WR * MI * 16 of them and walks tiles of
// BN keys; a block has one to 256 / GT groups. QREG: 16-component steps of the queries that live in registers instead of shared
// memory. EARLY: fragments asked for before the check.
template <bool E4M3, int D_, int MI_, int WR_, int BN_, int QREG_, int EARLY_ = 0> struct GqaTile {
  static constexpr int D = D_, MI = MI_, WR = WR_, BN = BN_, QREG = QREG_, EARLY = EARLY_;
  static constexpr int BM = WR * MI * 16, GT = WR * 32;
  static constexpr int ROW = E4M3 ? D : 2 * D;         // bytes of one key
  static constexpr int CHUNKS = ROW / 16;
  using KeyRows = Rows<CHUNKS>;
  using QueryRows = Rows<D / 8>;
  static constexpr int STAGE = 2 * BN * ROW;           // keys, then values
  static constexpr int Q_BYTES = BM * D * 2;
  static constexpr int HEAD = 128;                     // bytes of BlockState, and padding
  static constexpr int smem_bytes(int groups, int stages) {
    const int ring = Q_BYTES + groups * stages * (STAGE + BN * 8);
    const int merge = (groups - 1) * GT * MI * (D / 8 * 16 + 16);
    return HEAD + (ring > merge ? ring : merge);
  }
};

// This thread's place in its block. Worked out where it is needed, from the thread number read again: kept, it costs registers.
template <class Tile> struct Place {
  int group, gtid, warp, lane;
  __device__ __forceinline__ Place() {
    const int thread = thread_again();
    group = thread / Tile::GT;
    gtid = thread % Tile::GT;
    warp = gtid / 32;
    lane = thread % 32;
  }
};

// The first N ldmatrix results of what comes next.
template <int N> struct Fragments {
  uint32_t x[N > 0 ? N : 1][4];
};

template <class T, bool E4M3, class Tile> struct GqaBlock : Place<Tile> {
  static constexpr int D = Tile::D, MI = Tile::MI, BN = Tile::BN, GT = Tile::GT, NT = D / 8, KS = D / 16;
  using M = typename MathOver<T, E4M3>::Type;

  const AttnParams &p;
  const eyas_attn &a;
  const BlockState *state;
  uint32_t q_smem, stage_smem;
  uint32_t query_at;              // this lane's ldmatrix address of the queries
  uint32_t key_lane, value_lane;  // and its offsets in a stage
  int64_t *ring;
  uint32_t q[MI][Tile::QREG][4];
  float o[MI][NT][4];
  float ref[MI * 2], sum[MI * 2];  // reference maximum (base-2 score), this thread's part of the denominator

  __device__ __forceinline__ GqaBlock(const AttnParams &params) : p(params), a(params.a) {}

  // Rows of this thread: i = 2 * mi + half.
  __device__ __forceinline__ int row_of(int i) const {
    return state->row0 + this->warp * MI * 16 + (i >> 1) * 16 + (i & 1) * 8 + (this->lane >> 2);
  }

  __device__ __forceinline__ void load_queries(const Request &r, int row0, int head) {
    const int per = a.num_q_heads / a.num_kv_heads, rows = r.num_queries * per;
#pragma unroll 2
    for (int i = threadIdx.x; i < Tile::BM * KS; i += blockDim.x) {
      const int row = i / KS, ks = i % KS, g = row0 + row;
      const uint16_t *src = (const uint16_t *)a.q + (int64_t)(r.first_query + g / per) * a.q_stride_token +
                            (int64_t)(head * per + g % per) * a.q_stride_head + ks * 16;
      const int bytes = g < rows ? 16 : 0;
      src = bytes ? src : (const uint16_t *)a.q;
      copy16(q_smem + Tile::QueryRows::offset(row, 2 * ks), src, bytes);
      copy16(q_smem + Tile::QueryRows::offset(row, 2 * ks + 1), src + 8, bytes);
    }
  }

  // What this thread copied, once it is there, to the order in which widen() delivers keys.
  __device__ __forceinline__ void reorder_queries(char *queries) {
    for (int i = threadIdx.x; i < Tile::BM * KS; i += blockDim.x)
      order_as_widened<T>(*(uint4 *)(queries + Tile::QueryRows::offset(i / KS, 2 * (i % KS))),
                          *(uint4 *)(queries + Tile::QueryRows::offset(i / KS, 2 * (i % KS) + 1)));
  }

  __device__ __forceinline__ void read_query(uint32_t (&to)[4], int mi, int ks) const {
    ldmatrix4(to, Tile::QueryRows::along(query_at, 2 * ks) + mi * 16 * Tile::QueryRows::BYTES);
  }
  __device__ __forceinline__ void read_queries() {
#pragma unroll
    for (int mi = 0; mi < MI; ++mi)
#pragma unroll
      for (int ks = 0; ks < Tile::QREG; ++ks) read_query(q[mi][ks], mi, ks);
  }
  // Copies step ks of the queries to `to`, from registers where they are kept.
  __device__ __forceinline__ void query(uint32_t (&to)[MI][4], int ks) const {
#pragma unroll
    for (int mi = 0; mi < MI; ++mi) {
      if (ks < Tile::QREG) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[mi][i] = q[mi][ks < Tile::QREG ? ks : 0][i];
      } else {
        read_query(to[mi], mi, ks);
      }
    }
  }

  // Index entry of key i of the tile from key `first` on, if this split has it.
  __device__ __forceinline__ int load_entry(int first, int i) const {
    return i < BN && first + i < state->end ? state->index[index_entry(a, first + i)] : 0;
  }
  // Ring entry of key `pos`, whose index entry is `entry`. Tiles beyond the split's last one are copied, too, as zeros.
  __device__ __forceinline__ int64_t ring_entry(int entry, int pos) const {
    const int64_t element = token_offset(a, entry, pos) + (int64_t)blockIdx.x * a.kv_stride_head;
    return pos < state->end ? element * (E4M3 ? 1 : 2) : kPastEnd;
  }

  __device__ __forceinline__ void issue(int stage) {
    copy_tile<Tile::CHUNKS, BN, GT, true>(a, ring + stage * BN, stage_smem + stage * Tile::STAGE, Place<Tile>().gtid);
  }

  // Ring entries of the tile from key `first` on; a thread looks after every GT-th.
  template <int N> __device__ __forceinline__ void update_ring(int stage, const int (&entry)[N], int first) {
    const Place<Tile> at;
#pragma unroll
    for (int e = 0; e < N; ++e)
      if (at.gtid + e * GT < BN) ring[stage * BN + at.gtid + e * GT] = ring_entry(entry[e], first + at.gtid + e * GT);
  }

  // Fragment i of 16 keys: 32 bytes of each.
  __device__ __forceinline__ void load_keys(uint32_t (&to)[4], uint32_t at, int i) const {
    ldmatrix4(to, Tile::KeyRows::along(at, 2 * i));
  }
  // Fragment i of 16 keys' values.
  __device__ __forceinline__ void load_values(uint32_t (&to)[4], uint32_t at, int i) const {
    ldmatrix4_trans(to, Tile::KeyRows::along(at, 2 * i));
  }

  // Scores of 16 keys for all rows of the warp; `at`: this lane's first ldmatrix address; `early`: fragments already there.
  template <int EARLY> __device__ __forceinline__ void scores(float (&s)[MI][2][4], uint32_t at, const Fragments<EARLY> &early) const {
#pragma unroll
    for (int mi = 0; mi < MI; ++mi)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[mi][n][e] = 0.f;
    constexpr int STEPS = E4M3 ? 2 : 1;  // steps of 16 components in a fragment
#pragma unroll
    for (int i = 0; i < KS / STEPS; ++i) {
      uint32_t kb[4];
      if (i < EARLY) {
#pragma unroll
        for (int e = 0; e < 4; ++e) kb[e] = early.x[i < EARLY ? i : 0][e];
      } else {
        load_keys(kb, at, i);
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        uint32_t qa[MI][4];
        query(qa, i * STEPS + step);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t b0 = kb[2 * n], b1 = kb[2 * n + 1];
          if (E4M3) widen(b0, b1, kb[2 * step + n]);
#pragma unroll
          for (int mi = 0; mi < MI; ++mi) M::mma(s[mi][n], qa[mi], b0, b1);
        }
      }
    }
  }

  __device__ __forceinline__ void apply_mask(float (&s)[MI][2][4], int key) {
    const Place<Tile> at;
    const int row = state->row0 + at.warp * MI * 16 + at.lane % (MI * 16);  // a lane looks up one row's bits
    const uint32_t mine = visible16(a, state->request, blockIdx.z, row / (a.num_q_heads / a.num_kv_heads), key);
#pragma unroll
    for (int i = 0; i < 2 * MI; ++i) {
      const uint32_t bits = __shfl_sync(0xffffffffu, mine, i * 8 + (at.lane >> 2)) >> (2 * (at.lane & 3));
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!((bits >> (8 * n + e)) & 1)) s[i >> 1][n][2 * (i & 1) + e] = -INFINITY;
    }
  }

  // Raises the reference where a score has outgrown it. Rare, and the same for all lanes of the warp.
  __device__ __forceinline__ void raise_reference(const float (&largest)[MI * 2]) {
#pragma unroll
    for (int i = 0; i < 2 * MI; ++i) {
      const float now = fmaxf(ref[i], quad_max(largest[i]) * p.scale_log2), f = exp2_fast(ref[i] - now);
      ref[i] = now;
      sum[i] *= f;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        o[i >> 1][n][2 * (i & 1)] *= f;
        o[i >> 1][n][2 * (i & 1) + 1] *= f;
      }
    }
  }

  // Makes sure no score exceeds its row's reference by more than kLazyMax.
  __device__ __forceinline__ void check_reference(const float (&s)[MI][2][4]) {
    float largest[MI * 2], over = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2 * MI; ++i) {
      const int mi = i >> 1, h = 2 * (i & 1);
      largest[i] = fmaxf(fmaxf(s[mi][0][h], s[mi][0][h + 1]), fmaxf(s[mi][1][h], s[mi][1][h + 1]));
      over = fmaxf(over, fmaf(largest[i], p.scale_log2, -ref[i]));
    }
    if (__any_sync(0xffffffffu, over > kLazyMax)) raise_reference(largest);
  }

  // Scores to probabilities relative to the reference, packed as the A operand of the second product.
  __device__ __forceinline__ void soften(const float (&s)[MI][2][4], uint32_t (&pa)[MI][4]) {
#pragma unroll
    for (int i = 0; i < 2 * MI; ++i) {
      const int mi = i >> 1, h = i & 1;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = exp2_fast(fmaf(s[mi][n][2 * h], p.scale_log2, -ref[i]));
        const float y = exp2_fast(fmaf(s[mi][n][2 * h + 1], p.scale_log2, -ref[i]));
        sum[i] += x + y;
        pa[mi][2 * n + h] = M::pack(x, y);
      }
    }
  }

  // Adds 16 keys' values, weighed; `early`: fragments already there.
  template <int EARLY>
  __device__ __forceinline__ void add_values(const uint32_t (&pa)[MI][4], uint32_t at, const Fragments<EARLY> &early) {
#pragma unroll
    for (int i = 0; i < Tile::CHUNKS / 2; ++i) {
      uint32_t vb[4];
      if (i < EARLY) {
#pragma unroll
        for (int e = 0; e < 4; ++e) vb[e] = early.x[i < EARLY ? i : 0][e];
      } else {
        load_values(vb, at, i);
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        if constexpr (!E4M3) {
#pragma unroll
          for (int mi = 0; mi < MI; ++mi) M::mma(o[mi][2 * i + x], pa[mi], vb[2 * x], vb[2 * x + 1]);
        } else {  // 16 components as two tiles: the even ones, then the odd ones
          uint32_t even0, even1, odd0, odd1;
          widen_pairs(even0, odd0, vb[2 * x]);
          widen_pairs(even1, odd1, vb[2 * x + 1]);
#pragma unroll
          for (int mi = 0; mi < MI; ++mi) {
            M::mma(o[mi][2 * (2 * i + x)], pa[mi], even0, even1);
            M::mma(o[mi][2 * (2 * i + x) + 1], pa[mi], odd0, odd1);
          }
        }
      }
    }
  }

  // Keys [16 * I, BN) of a tile whose keys every query sees; `now`: the scores of its first 16. The next 16 keys' scores are
  // started before these keys' exponentials, which fill the tensor cores' latency.
  template <int I> __device__ __forceinline__ void consume_from(float (&now)[MI][2][4], uint32_t base) {
    constexpr bool MORE = 16 * (I + 1) < BN;
    const uint32_t keys = base + 16 * (I + 1) * Tile::ROW + key_lane, values = base + (BN + 16 * I) * Tile::ROW + value_lane;
    Fragments<Tile::EARLY> early;
#pragma unroll
    for (int i = 0; i < Tile::EARLY; ++i) {
      if (MORE) load_keys(early.x[i], keys, i);
      else load_values(early.x[i], values, i);
    }
    check_reference(now);
    float next[MI][2][4];
    uint32_t pa[MI][4];
    if constexpr (MORE) {
      scores(next, keys, early);
      soften(now, pa);
      add_values(pa, values, Fragments<0>());
      consume_from<I + 1>(next, base);
    } else {
      soften(now, pa);
      add_values(pa, values, early);
    }
  }
  // One tile whose keys every query sees. The copies of a later one, to stage `free`, are started under its first products.
  __device__ __forceinline__ void consume(uint32_t base, int free) {
    float s[MI][2][4];
    scores(s, base + key_lane, Fragments<0>());
    issue(free);
    consume_from<0>(s, base);
  }

  // One tile at the tree, a window's edge or the end of the keys: a handful per request.
  __device__ __forceinline__ void consume_masked(uint32_t base, int free, int key) {
    issue(free);
    const int keys = min(BN, state->request.kv_len - key);
#pragma unroll 1
    for (int tok = 0; tok < keys; tok += 16) {
      float s[MI][2][4];
      uint32_t pa[MI][4];
      scores(s, base + tok * Tile::ROW + key_lane, Fragments<0>());
      if (state->needs_mask(key + tok, 16)) apply_mask(s, key + tok);
      check_reference(s);
      soften(s, pa);
      add_values(pa, base + (BN + tok) * Tile::ROW + value_lane, Fragments<0>());
    }
  }

  // `queries`: their shared memory.
  __device__ __forceinline__ void walk(const Span &span, int groups, int stages, char *queries) {
    constexpr int kShare = (BN + GT - 1) / GT;  // ring entries a thread looks after
    const int step = groups * BN;
    int key = (span.first + Place<Tile>().group) * BN, stage = 0;
#pragma unroll 1
    for (int i = 0; i < stages - 1; ++i) {
      issue(i);
      copy_commit();
    }
    if (stages == 2) copy_wait<1>();
    else copy_wait<2>();
    if (E4M3) reorder_queries(queries);
    __syncthreads();  // the queries have arrived
    read_queries();
#pragma unroll 1
    for (; key < state->end; key += step) {
      copy_wait_oldest(stages);
      const Place<Tile> at;
      group_barrier(1 + at.group, GT);
      // The index entries of the tile after those in flight: asked for now, used after this tile's work.
      const int later = key + stages * step;
      int entry[kShare];
#pragma unroll
      for (int e = 0; e < kShare; ++e) entry[e] = load_entry(later, at.gtid + e * GT);
      const uint32_t base = stage_smem + stage * Tile::STAGE;
      const int free = stage == 0 ? stages - 1 : stage - 1;
      if (state->needs_mask(key, BN)) consume_masked(base, free, key);
      else consume(base, free);
      copy_commit();
      update_ring(stage, entry, later);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    copy_wait<0>();  // the zeros, before the stages' memory gets another use
    static_cast<Place<Tile> &>(*this) = Place<Tile>();
  }
};

}  // namespace eyas

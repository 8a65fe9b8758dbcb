// Attention of a draft tree over an absorbed MLA cache: keys of 576 components, the first 512 of which are the values.
//
// A block serves R * 32 packed rows (tree node * heads + head) with R groups of 4 warps. For the scores the 4 warps of a group
// cut keys (TS) and components (KS) between them, so that a warp computes 32 rows x TW keys and reads each operand from
// shared memory as seldom as it can; partial scores are exchanged, each warp finishing 1/KS of them. For the second product
// the probabilities go through shared memory and each warp owns 128 of the 512 value components.
#pragma once
#include "attention.cuh"

namespace eyas {

// QR: 16-component steps per warp of the queries that live in registers instead of shared memory.
template <bool E4M3, int R_, int TS_, int KS_, int TW_, int QR_> struct MlaTile {
  static constexpr int DK = 576, DV = 512;
  static constexpr int R = R_, TS = TS_, KS = KS_, TW = TW_, QR = QR_;
  static constexpr int BM = R * 32, BN = TS * TW, THREADS = R * 128;
  static constexpr int NT = TW / 8, UNITS = 2 * NT / KS;        // 8-key tiles per warp; 16x8 score tiles a warp finishes
  static constexpr int STEPS = DK / 16 / KS, QSTEPS = STEPS - QR;
  static constexpr int ROW = E4M3 ? DK : 2 * DK, CHUNKS = ROW / 16, QCHUNKS = 2 * KS * QSTEPS;
  using KeyRows = Rows<CHUNKS>;
  using QueryRows = Rows<QCHUNKS>;
  using WeightRows = Rows<(KS == 2 ? TW : BN) / 8>;
  static constexpr int SLOTS = TS * (NT / UNITS);               // warps that share a row's keys
  static constexpr int STAGE = BN * ROW;
  // Probabilities: with KS = 2 a warp finishes 16 whole rows of its keys and leaves them where it read its exchanged scores,
  // else they have an array of their own.
  static constexpr bool IN_PLACE = KS == 2;
  static constexpr int X_BLOCK = (KS - 1) * UNITS * 512, X_BYTES = R * TS * KS * X_BLOCK;
  static constexpr int Q_BYTES = BM * QCHUNKS * 16, P_BYTES = IN_PLACE ? 0 : BM * BN * 2;
  static constexpr int STAT_BYTES = BM * 4 * (1 + 4) + 16;      // reference, 4 per-warp statistics, flags
  static constexpr int smem_bytes(int stages) { return Q_BYTES + P_BYTES + X_BYTES + STAT_BYTES + stages * (STAGE + BN * 8); }
  static_assert(TS * KS == 4 && UNITS <= NT && (!E4M3 || (TW == 32 && QR == 0)));
};

template <class T, bool E4M3, class Tile> struct MlaBlock {
  static constexpr int NT = Tile::NT, UNITS = Tile::UNITS, BN = Tile::BN, TW = Tile::TW;
  using M = typename MathOver<T, E4M3>::Type;

  const AttnParams &p;
  const eyas_attn &a;
  int kv_len, mask_from, mask_below;            // keys from mask_from on, and below mask_below, are not visible to every query
  int lane, warp, rows4, ts, ks;                // rows4: row group; warp: 0..3 in it
  const int32_t *index;
  uint32_t stage_smem, exchange_smem, p_smem;
  uint32_t query_at, weight_at;                 // this lane's ldmatrix addresses, and offsets in a stage
  uint32_t key_lane, value_lane;
  float4 *exchange;
  float *row_ref, *row_stat;   // [BM], [BM][4]
  volatile int *flag;          // [R]
  int64_t *ring;
  uint32_t qr[2][Tile::QR ? Tile::QR : 1][4];
  float o[2][16][4];
  float ref[2], sum[2];        // of the rows this warp finishes: tile-row own_mi(), both halves

  __device__ __forceinline__ MlaBlock(const AttnParams &params) : p(params), a(params.a) {}
  __device__ __forceinline__ int own_mi() const { return ks * UNITS / NT; }
  __device__ __forceinline__ int own_slot() const { return ts * (NT / UNITS) + ks * UNITS % NT / UNITS; }
  __device__ __forceinline__ void group_sync() const { group_barrier(1 + rows4, 128); }

  // Components go to the KS parts in turn, 16 at a time: step s of part ks is s * KS + ks. The first QR steps of a part live in
  // its warps' registers, the others in shared memory.
  __device__ __forceinline__ void load_queries(char *smem, const Request &r) {
    const int rows = r.num_queries * a.num_q_heads, row0 = blockIdx.x * Tile::BM;
    constexpr int kSteps = Tile::KS * Tile::QSTEPS;
#pragma unroll 2
    for (int i = threadIdx.x; i < Tile::BM * kSteps; i += Tile::THREADS) {
      const int row = i / kSteps, s = i % kSteps, g = row0 + row, column = (Tile::KS * Tile::QR + s) * 16;
      const uint16_t *src = (const uint16_t *)a.q + (int64_t)(r.first_query + g / a.num_q_heads) * a.q_stride_token +
                            (int64_t)(g % a.num_q_heads) * a.q_stride_head + column;
      const int bytes = g < rows ? 16 : 0;
      src = bytes ? src : (const uint16_t *)a.q;
      copy16(smem_address(smem + Tile::QueryRows::offset(row, 2 * s)), src, bytes);
      copy16(smem_address(smem + Tile::QueryRows::offset(row, 2 * s + 1)), src + 8, bytes);
    }
#pragma unroll
    for (int mi = 0; mi < 2; ++mi)
#pragma unroll
      for (int s = 0; s < Tile::QR; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int g = row0 + rows4 * 32 + mi * 16 + (i & 1) * 8 + (lane >> 2);
          const int column = (s * Tile::KS + ks) * 16 + (i >> 1) * 8 + 2 * (lane & 3);
          const uint16_t *src = (const uint16_t *)a.q + (int64_t)(r.first_query + g / a.num_q_heads) * a.q_stride_token +
                                (int64_t)(g % a.num_q_heads) * a.q_stride_head + column;
          qr[mi][s][i] = g < rows ? *(const uint32_t *)src : 0;
        }
  }

  // What this thread copied, once it is there, to the order in which widen() delivers keys.
  __device__ __forceinline__ void reorder_queries(char *smem) {
    constexpr int kSteps = Tile::KS * Tile::QSTEPS;
    for (int i = threadIdx.x; i < Tile::BM * kSteps; i += Tile::THREADS)
      order_as_widened<T>(*(uint4 *)(smem + Tile::QueryRows::offset(i / kSteps, 2 * (i % kSteps))),
                          *(uint4 *)(smem + Tile::QueryRows::offset(i / kSteps, 2 * (i % kSteps) + 1)));
  }

  __device__ __forceinline__ void query(uint32_t (&to)[2][4], int step) const {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      if (step < Tile::QR) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[mi][i] = qr[mi][step < Tile::QR ? step : 0][i];
      } else {
        ldmatrix4(to[mi], Tile::QueryRows::along(query_at, 2 * Tile::KS * (step - Tile::QR)) + mi * 16 * Tile::QueryRows::BYTES);
      }
    }
  }

  __device__ __forceinline__ int64_t ring_entry(int entry, int pos) const {
    return pos < kv_len ? token_offset(a, entry, pos) * (E4M3 ? 1 : 2) : kPastEnd;
  }

  __device__ __forceinline__ void issue(int stage) {
    copy_tile<Tile::CHUNKS, BN, Tile::THREADS, false>(a, ring + stage * BN, stage_smem + stage * Tile::STAGE, threadIdx.x);
  }

  // This warp's part of the scores: 32 rows, TW keys, 1/KS of the components.
  __device__ __forceinline__ void partial_scores(float (&s)[2][NT][4], uint32_t base) {
#pragma unroll
    for (int i = 0; i < 2 * NT * 4; ++i) s[i / (4 * NT)][i / 4 % NT][i % 4] = 0.f;
    const uint32_t at = base + key_lane;
#pragma unroll
    for (int step = 0; step < Tile::STEPS; ++step) {
      uint32_t qa[2][4];
      query(qa, step);
      if constexpr (!E4M3) {
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
          uint32_t kb[4];
          ldmatrix4(kb, Tile::KeyRows::along(at, 2 * Tile::KS * step) + n * 8 * Tile::ROW);
#pragma unroll
          for (int mi = 0; mi < 2; ++mi) {
            M::mma(s[mi][n], qa[mi], kb[0], kb[1]);
            M::mma(s[mi][n + 1], qa[mi], kb[2], kb[3]);
          }
        }
      } else {
        uint32_t kb[4];
        ldmatrix4(kb, Tile::KeyRows::along(at, Tile::KS * step));
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          uint32_t b0, b1;
          widen(b0, b1, kb[n]);
#pragma unroll
          for (int mi = 0; mi < 2; ++mi) M::mma(s[mi][n], qa[mi], b0, b1);
        }
      }
    }
  }

  // Hands the score tiles other warps finish to them and adds up its own.
  __device__ __forceinline__ void exchange_scores(const float (&s)[2][NT][4], float (&own)[UNITS][4]) {
    constexpr int KS = Tile::KS;
    float4 *mine = exchange + (rows4 * Tile::TS + ts) * KS * (KS - 1) * UNITS * 32 + lane;
#pragma unroll
    for (int u = 0; u < 2 * NT; ++u) {
      const int owner = u / UNITS, j = u % UNITS;
      const float *x = s[u / NT][u % NT];
      if (owner == ks) {
#pragma unroll
        for (int e = 0; e < 4; ++e) own[j][e] = x[e];
      } else {
        const int slot = ks < owner ? ks : ks - 1;
        mine[((owner * (KS - 1) + slot) * UNITS + j) * 32] = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
    group_sync();
#pragma unroll
    for (int i = 0; i < (KS - 1) * UNITS; ++i) {
      const float4 x = mine[(ks * (KS - 1) * UNITS + i) * 32];
      float *y = own[i % UNITS];
      y[0] += x.x, y[1] += x.y, y[2] += x.z, y[3] += x.w;
    }
  }

  __device__ __forceinline__ void apply_mask(float (&own)[UNITS][4], int key) {
    const Request r = load_request(a, blockIdx.z);
    const int n0 = ks * UNITS % NT, row = blockIdx.x * Tile::BM + rows4 * 32 + own_mi() * 16 + (lane & 15);
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {  // a lane looks up one row's bits
      const uint32_t mine = visible16(a, r, blockIdx.z, row / a.num_q_heads, key + ts * TW + (n0 + j) * 8);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t bits = __shfl_sync(0xffffffffu, mine, h * 8 + (lane >> 2)) >> (2 * (lane & 3));
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(bits >> e & 1)) own[j][2 * h + e] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void write_probabilities(const float (&own)[UNITS][4]) {
    const int n0 = ks * UNITS % NT;
    __syncwarp();  // in place: the scores have been read
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = (Tile::IN_PLACE ? 0 : rows4 * 32 + own_mi() * 16) + h * 8 + (lane >> 2);
      const uint32_t block = Tile::IN_PLACE ? exchange_smem + ((rows4 * Tile::TS + ts) * Tile::KS + ks) * Tile::X_BLOCK : p_smem;
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        const float x = exp2_fast(fmaf(own[j][2 * h], p.scale_log2, -ref[h]));
        const float y = exp2_fast(fmaf(own[j][2 * h + 1], p.scale_log2, -ref[h]));
        sum[h] += x + y;
        const int chunk = (Tile::IN_PLACE ? 0 : ts * (TW / 8)) + n0 + j;
        const uint32_t at = block + Tile::WeightRows::offset(row, chunk) + 4 * (lane & 3);
        store_shared(at, M::pack(x, y));
      }
    }
  }

  // Probabilities relative to the reference into shared memory. Where a score has outgrown its row's reference, the
  // group's warps agree on new ones, write the probabilities again and rescale what they have summed so far.
  __device__ __forceinline__ void soften(const float (&own)[UNITS][4]) {
    float largest[2] = {-INFINITY, -INFINITY};
    bool over = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < UNITS; ++j) largest[h] = fmaxf(largest[h], fmaxf(own[j][2 * h], own[j][2 * h + 1]));
      over = over || fmaf(largest[h], p.scale_log2, -ref[h]) > kLazyMax;
    }
    const float before[2] = {sum[0], sum[1]};
    if (__any_sync(0xffffffffu, over)) flag[rows4] = 1;
    else write_probabilities(own);
    group_sync();
    if (flag[rows4] == 0) return;

    const int row = rows4 * 32 + (lane >> 2), mine = row + own_mi() * 16;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = quad_max(largest[h]) * p.scale_log2;
      if ((lane & 3) == 0) row_stat[(mine + h * 8) * 4 + own_slot()] = top;
    }
    group_sync();
    float now[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // every warp holds all 32 rows' accumulators
      const int at = row + i * 8;
      now[i] = row_ref[at];
#pragma unroll
      for (int s = 0; s < Tile::SLOTS; ++s) now[i] = fmaxf(now[i], row_stat[at * 4 + s]);
      const float f = exp2_fast(row_ref[at] - now[i]);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        o[i >> 1][n][2 * (i & 1)] *= f;
        o[i >> 1][n][2 * (i & 1) + 1] *= f;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = own_mi() ? now[2 + h] : now[h];
      sum[h] = before[h] * exp2_fast(ref[h] - next);
      ref[h] = next;
    }
    write_probabilities(own);
    group_sync();
    if (warp == 0) {
      if ((lane & 3) == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) row_ref[row + i * 8] = now[i];
      if (lane == 0) flag[rows4] = 0;
    }
  }

  __device__ __forceinline__ void mask_and_soften(float (&own)[UNITS][4], int key) {
    if (key + BN > mask_from || key < mask_below) apply_mask(own, key);
    soften(own);
  }

  __device__ __forceinline__ void add_values(uint32_t base) {
#pragma unroll (Tile::R)
    for (int tok = 0; tok < BN; tok += 16) {
      const uint32_t at = base + tok * Tile::ROW + value_lane;
      uint32_t pa[2][4];
#pragma unroll
      for (int mi = 0; mi < 2; ++mi)
        ldmatrix4(pa[mi], Tile::IN_PLACE ? Tile::WeightRows::along(weight_at, tok % TW / 8) + (tok / TW * Tile::KS + mi) * Tile::X_BLOCK
                                         : Tile::WeightRows::along(weight_at, tok / 8) + mi * 16 * Tile::WeightRows::BYTES);
#pragma unroll
      for (int j = 0; j < (E4M3 ? 4 : 8); ++j) {
        uint32_t vb[4];
        ldmatrix4_trans(vb, Tile::KeyRows::along(at, 2 * j));
        if constexpr (!E4M3) {
#pragma unroll
          for (int mi = 0; mi < 2; ++mi) {
            M::mma(o[mi][2 * j], pa[mi], vb[0], vb[1]);
            M::mma(o[mi][2 * j + 1], pa[mi], vb[2], vb[3]);
          }
        } else {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            uint32_t even0, even1, odd0, odd1;
            widen_pairs(even0, odd0, vb[2 * x]);
            widen_pairs(even1, odd1, vb[2 * x + 1]);
#pragma unroll
            for (int mi = 0; mi < 2; ++mi) {
              M::mma(o[mi][2 * (2 * j + x)], pa[mi], even0, even1);
              M::mma(o[mi][2 * (2 * j + x) + 1], pa[mi], odd0, odd1);
            }
          }
        }
      }
    }
  }
};

}  // namespace eyas

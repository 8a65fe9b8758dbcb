// Grouped-query attention of a draft tree. One block serves one KV head of one request, one tile of packed rows
// (row = tree node * heads per KV head + head) and one split of the keys.
//
// A block is `groups` groups of WR warps. All groups hold the same rows; each walks every groups-th tile of keys through its
// own cp.async ring, so that a group waits for its own bytes only, and the groups' results are merged in shared memory at
// the end. Queries live in registers. The running maximum is a lazy reference: accumulators are rescaled only when a score
// exceeds it by 2^8, so a usual tile needs one vote and no shuffle.
#pragma once
#include "attention.cuh"

namespace eyas {

// MI: 16-row tiles per warp. WR: row warps per group. BN: keys per tile. QREG: 16-component steps of the queries kept in
// registers, the rest is read from shared memory again for every 16 keys.
template <bool E4M3, int D_, int MI_, int WR_, int BN_, int QREG_ = D_ / 16> struct GqaTile {
  static constexpr int D = D_, MI = MI_, WR = WR_, BN = BN_, QREG = QREG_;
  static constexpr int BM = WR * MI * 16, GT = WR * 32;
  static constexpr int ROW = E4M3 ? D : 2 * D;         // bytes of one key
  static constexpr int CHUNKS = ROW / 16;
  using KeyRows = Rows<CHUNKS>;
  using QueryRows = Rows<D / 8>;
  static constexpr int STAGE = 2 * BN * ROW;           // keys, then values
  static constexpr int Q_BYTES = BM * D * 2;
  static constexpr int smem_bytes(int groups, int stages) {
    const int ring = Q_BYTES + groups * stages * (STAGE + BN * 8);
    const int merge = (groups - 1) * GT * MI * (D / 8 * 16 + 16);
    return ring > merge ? ring : merge;
  }
};

template <class T, bool E4M3, class Tile> struct GqaBlock {
  static constexpr int D = Tile::D, MI = Tile::MI, BN = Tile::BN, GT = Tile::GT, NT = D / 8, KS = D / 16;
  using M = Math<T>;

  const AttnParams &p;
  const eyas_attn &a;
  int kv_len, mask_from, mask_below;  // keys from mask_from on, and below mask_below, are not visible to every query
  int row0, lane, warp, gtid, group;
  const int32_t *index;
  uint32_t q_smem, stage_smem;
  uint32_t key_lane, value_lane;      // this lane's ldmatrix offsets in a stage
  int64_t *ring;
  uint32_t q[MI][Tile::QREG][4];
  float o[MI][NT][4];
  float ref[MI * 2], sum[MI * 2];  // reference maximum (base-2 score), this thread's part of the denominator

  __device__ __forceinline__ GqaBlock(const AttnParams &params) : p(params), a(params.a) {}

  // Rows of this thread: i = 2 * mi + half.
  __device__ __forceinline__ int row_of(int i) const {
    return row0 + warp * MI * 16 + (i >> 1) * 16 + (i & 1) * 8 + (lane >> 2);
  }

  __device__ __forceinline__ void load_queries(char *smem, const Request &r, int head) {
    const int per = a.num_q_heads / a.num_kv_heads, rows = r.num_queries * per;
#pragma unroll 2
    for (int i = threadIdx.x; i < Tile::BM * KS; i += blockDim.x) {
      const int row = i / KS, ks = i % KS, g = row0 + row;
      const uint16_t *src = (const uint16_t *)a.q + (int64_t)(r.first_query + g / per) * a.q_stride_token +
                            (int64_t)(head * per + g % per) * a.q_stride_head + ks * 16;
      char *lo = smem + Tile::QueryRows::offset(row, 2 * ks), *hi = smem + Tile::QueryRows::offset(row, 2 * ks + 1);
      if constexpr (!E4M3) {
        const int bytes = g < rows ? 16 : 0;
        src = bytes ? src : (const uint16_t *)a.q;
        copy16(smem_address(lo), src, bytes);
        copy16(smem_address(hi), src + 8, bytes);
      } else {  // the order in which from_e4m3 delivers a key's 16 components
        uint4 x = make_uint4(0, 0, 0, 0), y = x;
        if (g < rows) x = ((const uint4 *)src)[0], y = ((const uint4 *)src)[1];
        *(uint4 *)lo = make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410),
                                  __byte_perm(y.x, y.y, 0x5410), __byte_perm(y.z, y.w, 0x5410));
        *(uint4 *)hi = make_uint4(__byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x7632),
                                  __byte_perm(y.x, y.y, 0x7632), __byte_perm(y.z, y.w, 0x7632));
      }
    }
  }

  __device__ __forceinline__ void read_query(uint32_t (&to)[4], int mi, int ks) const {
    const uint32_t at = q_smem + Tile::QueryRows::offset((warp * MI + mi) * 16 + (lane & 15), lane >> 4);
    ldmatrix4(to, Tile::QueryRows::along(at, 2 * ks));
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

  // Ring entry of key `pos`, whose index entry is `entry`.
  __device__ __forceinline__ int64_t ring_entry(int entry, int pos) const {
    const int64_t element = token_offset(a, entry, pos) + (int64_t)blockIdx.x * a.kv_stride_head;
    return pos < kv_len ? element * (E4M3 ? 1 : 2) : kPastEnd;
  }

  __device__ __forceinline__ void issue(int stage) {
    copy_tile<Tile::CHUNKS, BN, GT, true>(a, ring + stage * BN, stage_smem + stage * Tile::STAGE, gtid);
  }

  // Scores of 16 keys for all rows of the warp; `at`: this lane's first ldmatrix address.
  __device__ __forceinline__ void scores(float (&s)[MI][2][4], uint32_t at) {
#pragma unroll
    for (int mi = 0; mi < MI; ++mi)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[mi][n][e] = 0.f;
    if constexpr (!E4M3) {
#pragma unroll
      for (int ks = 0; ks < KS; ++ks) {
        uint32_t kb[4], qa[MI][4];
        ldmatrix4(kb, Tile::KeyRows::along(at, 2 * ks));
        query(qa, ks);
#pragma unroll
        for (int mi = 0; mi < MI; ++mi) {
          M::mma(s[mi][0], qa[mi], kb[0], kb[1]);
          M::mma(s[mi][1], qa[mi], kb[2], kb[3]);
        }
      }
    } else {
#pragma unroll
      for (int ks = 0; ks < KS; ks += 2) {
        uint32_t kb[4];
        ldmatrix4(kb, Tile::KeyRows::along(at, ks));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t qa[MI][4];
          query(qa, ks + j);
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const uint32_t w = kb[2 * j + n], b0 = M::from_e4m3(w << 8), b1 = M::from_e4m3(w);
#pragma unroll
            for (int mi = 0; mi < MI; ++mi) M::mma(s[mi][n], qa[mi], b0, b1);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void apply_mask(float (&s)[MI][2][4], int key) {
    const Request r = load_request(a, blockIdx.z);
    const int row = row0 + warp * MI * 16 + lane % (MI * 16);  // a lane looks up one row's bits
    const uint32_t mine = visible16(a, r, blockIdx.z, row / (a.num_q_heads / a.num_kv_heads), key);
#pragma unroll
    for (int i = 0; i < 2 * MI; ++i) {
      const uint32_t bits = __shfl_sync(0xffffffffu, mine, i * 8 + (lane >> 2)) >> (2 * (lane & 3));
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

  __device__ __forceinline__ void add_values(const uint32_t (&pa)[MI][4], uint32_t at) {
    if constexpr (!E4M3) {
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        uint32_t vb[4];
        ldmatrix4_trans(vb, Tile::KeyRows::along(at, j));
#pragma unroll
        for (int mi = 0; mi < MI; ++mi) {
          M::mma(o[mi][j], pa[mi], vb[0], vb[1]);
          M::mma(o[mi][j + 1], pa[mi], vb[2], vb[3]);
        }
      }
    } else {  // 16 components as two tiles: the even ones, then the odd ones
#pragma unroll
      for (int j = 0; j < KS; j += 2) {
        uint32_t vb[4];
        ldmatrix4_trans(vb, Tile::KeyRows::along(at, j));
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const uint32_t even0 = M::from_e4m3(vb[2 * x] << 8), even1 = M::from_e4m3(vb[2 * x + 1] << 8);
          const uint32_t odd0 = M::from_e4m3(vb[2 * x]), odd1 = M::from_e4m3(vb[2 * x + 1]);
#pragma unroll
          for (int mi = 0; mi < MI; ++mi) {
            M::mma(o[mi][2 * (j + x)], pa[mi], even0, even1);
            M::mma(o[mi][2 * (j + x) + 1], pa[mi], odd0, odd1);
          }
        }
      }
    }
  }

  // One tile whose keys every query sees. The next 16 keys' scores are started before these 16 keys' exponentials, which fill
  // the tensor cores' latency.
  __device__ __forceinline__ void consume(uint32_t base) {
    float s[2][MI][2][4];
    scores(s[0], base + key_lane);
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) {
      check_reference(s[i & 1]);
      if (i + 1 < BN / 16) scores(s[(i + 1) & 1], base + 16 * (i + 1) * Tile::ROW + key_lane);
      uint32_t pa[MI][4];
      soften(s[i & 1], pa);
      add_values(pa, base + (BN + 16 * i) * Tile::ROW + value_lane);
    }
  }

  // One tile at the tree or at a window's edge: a handful per request.
  __device__ __forceinline__ void consume_masked(uint32_t base, int key) {
#pragma unroll 1
    for (int tok = 0; tok < BN; tok += 16) {
      float s[MI][2][4];
      uint32_t pa[MI][4];
      scores(s, base + tok * Tile::ROW + key_lane);
      apply_mask(s, key + tok);
      check_reference(s);
      soften(s, pa);
      add_values(pa, base + (BN + tok) * Tile::ROW + value_lane);
    }
  }

  __device__ __forceinline__ void walk(const Span &span, int groups, int stages) {
    constexpr int kShare = BN / Tile::WR;  // ring entries a warp looks after
    const int step = groups * BN;
    int left = (span.count - group + groups - 1) / groups;  // tiles of this group
    int key = (span.first + group) * BN, stage = 0;
#pragma unroll 1
    for (int i = 0; i < stages - 1; ++i) {
      if (i < left) issue(i);
      copy_commit();
    }
    if (stages == 2) copy_wait<1>();
    else copy_wait<2>();
    __syncthreads();  // the queries have arrived
    read_queries();
#pragma unroll 1
    for (; left > 0; --left, key += step) {
      copy_wait_oldest(stages);
      group_barrier(1 + group, GT);
      if (left >= stages) issue(stage == 0 ? stages - 1 : stage - 1);
      copy_commit();
      // The index entry of the tile after those in flight: asked for now, used after this tile's work.
      const int later = key + stages * step + warp * kShare + lane;
      const bool more = lane < kShare && left > stages;
      const int entry = more && later < kv_len ? index[index_entry(a, later)] : 0;
      const uint32_t base = stage_smem + stage * Tile::STAGE;
      if (key + BN > mask_from || key < mask_below) consume_masked(base, key);
      else consume(base);
      if (more) ring[stage * BN + warp * kShare + lane] = ring_entry(entry, later);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
  }
};

}  // namespace eyas

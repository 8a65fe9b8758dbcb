// What both attention kernels share: one request's extent, the cut of its keys into splits, paging, mask bits, partial results.
#pragma once
#include "eyas/cuda_api.h"
#include "mma.cuh"

namespace eyas {

constexpr float kNoMax = -1e30f;      // reference maximum before any key was seen; finite, so differences stay defined
constexpr float kLazyMax = 8.f;       // scores may exceed the reference by 2^8 before the accumulators are rescaled
constexpr float kLn2 = 0.69314718056f;
constexpr int kDeviceSmem = 101376;   // bytes a block may have on sm_86, 89, 120; larger chips use more if told

struct AttnParams {
  eyas_attn a;
  float scale_log2;   // softmax scale * log2(e) * k_scale
  __half *part_out;   // [splits, batch * max_tree * Hq, Dv], each row divided by its largest magnitude
  float2 *part_stat;  // [splits, batch * max_tree * Hq]: base-2 log-sum-exp, and that magnitude
};

struct Request {
  int first_query, num_queries, kv_len;
  int prefix;  // keys that every query sees; the mask covers those behind them
};

__device__ __forceinline__ Request load_request(const eyas_attn &a, int b) {
  Request r;
  r.first_query = a.q_start ? a.q_start[b] : b * a.max_tree;
  r.num_queries = a.q_start ? a.q_start[b + 1] - r.first_query : a.max_tree;
  const int tree = a.tree_keys ? a.tree_keys : r.num_queries;
  r.kv_len = (int)a.seq_lens[b] + (a.seq_lens_are_prefix ? tree : 0);
  r.prefix = r.kv_len - tree;
  return r;
}

struct Span {
  int first, count;  // tiles of this split
  int active;        // splits of this request that have any; 0 without keys
};

// Tiles of `split`: as even as whole tiles allow, with a tile for every group at least. Real lengths are read on the device, so a
// captured graph serves any lengths; short requests use fewer splits.
__device__ __forceinline__ Span split_span(const eyas_attn &a, const Request &r, int tile, int split) {
  const int begin = a.window > 0 ? max(0, r.prefix - a.window + 1) / tile : 0;
  const int tiles = (r.kv_len + tile - 1) / tile - begin;
  Span s = {};
  if (r.kv_len <= 0) return s;
  s.active = max(1, min(a.num_splits, tiles / a.groups));
  const int per = tiles / s.active, even = s.active - tiles % s.active;  // the splits from `even` on have a tile more
  s.first = begin + split * per + max(0, split - even);
  s.count = split < s.active ? per + (split >= even) : 0;
  return s;
}

// Where token `pos` is in a request's index, and its element offset in the caches once that entry is there. Two steps, so that
// the entry can be loaded long before it is used.
__device__ __forceinline__ int index_entry(const eyas_attn &a, int pos) { return a.page_size == 1 ? pos : pos / a.page_size; }
__device__ __forceinline__ int64_t token_offset(const eyas_attn &a, int entry, int pos) {
  if (a.page_size == 1) return (int64_t)entry * a.kv_stride_token;
  return (int64_t)entry * a.kv_stride_page + (int64_t)(pos % a.page_size) * a.kv_stride_token;
}

// Brings the index entries of keys [first, end) to the L2 cache: they are needed one tile at a time, each time in a hurry.
__device__ __forceinline__ void prefetch_index(const eyas_attn &a, const int32_t *index, int first, int end) {
  const int32_t *stop = index + index_entry(a, end - 1) + 1;
  for (const int32_t *at = index + index_entry(a, first) + 32 * threadIdx.x; at < stop; at += 32 * blockDim.x)
    prefetch_line(at);
}

__device__ __forceinline__ const int32_t *request_index(const eyas_attn &a, int b) {
  if (a.index_start) return a.kv_index + a.index_start[b];
  return a.kv_index + (a.index_rows ? a.index_rows[b] : b) * a.index_stride;
}

// Which of the 16 keys from `key` on query `t` may see, bit i for key + i.
__device__ __forceinline__ uint32_t visible16(const eyas_attn &a, const Request &r, int b, int t, int key) {
  const int c = key - r.prefix;  // tree slot of the first key
  uint32_t bits = 0xffffu;
  t = min(t, r.num_queries - 1);
  if (c > -16) {
    if (a.mask) {
      const uint32_t *row = a.mask + b * a.mask_stride_batch + (int64_t)t * a.mask_words;
      const int w = c >> 5;
      const uint32_t lo = w < 0 ? ~0u : w < a.mask_words ? row[w] : 0u;
      const uint32_t hi = w + 1 < a.mask_words ? row[w + 1] : 0u;
      bits = __funnelshift_r(lo, hi, c & 31) & 0xffffu;
    } else {
      bits = 0xffffu >> min(max(15 - (t - c), 0), 16);
    }
    bits &= (1u << min(max(r.kv_len - key, 0), 16)) - 1u;
  }
  if (a.window > 0) {
    const int64_t low = a.positions[r.first_query + t] - a.window;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int n = key + i;
      if (n >= r.kv_len) break;
      const int64_t at = n < r.prefix ? n : a.positions[r.first_query + n - r.prefix];
      if (at <= low) bits &= ~(1u << i);
    }
  }
  return bits;
}

// What a block's rows are of a request without keys, where no combine kernel follows: zeros, as the CPU's. A row is (query, one
// of `per` heads from `head` on).
template <int DV>
__device__ __forceinline__ void store_nothing(const eyas_attn &a, const Request &r, int first_row, int end_row, int per, int head) {
#pragma unroll 1
  for (int i = first_row * (DV / 2) + threadIdx.x; i < end_row * (DV / 2); i += blockDim.x) {
    const int row = i / (DV / 2), column = 2 * (i % (DV / 2)), h = head + row % per;
    const int64_t query = r.first_query + row / per;
    *(uint32_t *)((uint16_t *)a.out + query * a.out_stride_token + h * a.out_stride_head + column) = 0;
    if (a.lse && column == 0) a.lse[query * a.num_q_heads + h] = -INFINITY;
  }
}

// A ring entry: byte offset of a key in the caches (a multiple of 16), or kPastEnd: copy zeros.
constexpr int64_t kPastEnd = 1;

// Starts the copies of a tile's rows. LANES threads share a row, each taking every LANES-th chunk of it; both addresses of a
// row's copies then differ by constants only.
template <int CHUNKS, int BN, int THREADS, bool VALUES>
__device__ __forceinline__ void copy_tile(const eyas_attn &a, const int64_t *entries, uint32_t base, int thread) {
  using R = Rows<CHUNKS>;
  constexpr int LANES = R::MASK + 1, PASS = THREADS / LANES;
  static_assert(CHUNKS % LANES == 0);
#pragma unroll
  for (int i = 0; i < (BN + PASS - 1) / PASS; ++i) {
    const int row = thread / LANES + i * PASS, column = thread % LANES;
    if (BN % PASS != 0 && row >= BN) break;
    const int64_t at = entries[row];
    const int bytes = (~(int)at & 1) << 4;
    const int64_t from = (at & ~(int64_t)15) + column * 16;
    const uint32_t to = base + R::offset(row, column);
    const char *k = (const char *)a.k + from, *v = (const char *)a.v + from;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += LANES) {
      copy16(to + c * 16, k + c * 16, bytes);
      if constexpr (VALUES) copy16(to + c * 16 + BN * R::BYTES, v + c * 16, bytes);
    }
  }
}

}  // namespace eyas

// The work of attention: one unit's rows against one chunk of keys.
#include <algorithm>
#include <cfloat>
#include <cstring>

#include "attention.h"
#include "convert.h"

namespace eyas::cpu {
namespace {

// One per thread.
struct Scratch {
  std::vector<float> queries, keys, values, scores, tree_scores, tree_values;
  std::vector<uint32_t> query_pairs, key_pairs, value_pairs;
  std::vector<const void*> rows;
  std::vector<const float*> seen_values;
};

struct Range {
  int64_t first, last;  // ranks [first, last)

  // Its part of the `count` ranks from `start` on, counted from there.
  Range within(int64_t start, int64_t count) const {
    return {std::clamp<int64_t>(first - start, 0, count), std::clamp<int64_t>(last - start, 0, count)};
  }
};

struct Row : Range {    // of what it sees
  const int32_t* seen;  // tree columns at ranks prefix, prefix + 1, ...; or null
};

class Chunk {
 public:
  Chunk(const eyas_cpu_attention& a, const Kernels& kernels, const Unit& unit, Scratch& scratch)
      : a_(a), kernels_(kernels), unit_(unit), request_(*unit.request), scratch_(scratch),
        group_(a.num_q_heads / a.num_kv_heads), padded_(padded_width(a.v_head_dim)),
        pairs_(kernels.gemm_pairs != nullptr && a.q_dtype == EYAS_CPU_BF16 && a.kv_dtype == EYAS_CPU_BF16),
        value_pairs_(pairs_ && kernels.add_value_pairs != nullptr) {
    read_rows();
    load_queries();
  }

  void run(int64_t chunk, const Partial& result) {
    const int64_t chunk_end = std::min((chunk + 1) * kChunk, last_);
    if (request_.tree_mask != nullptr && chunk_end > request_.prefix) load_tree();
    for (int64_t start = chunk * kChunk; start < chunk_end; start += kBlock)
      if (start + kBlock > first_) step(start, result);
  }

 private:
  int64_t query_of(int64_t row) const { return (unit_.first_row + row) / group_; }

  void read_rows() {
    first_ = INT64_MAX;
    by_all_ = {0, INT64_MAX};
    for (int64_t r = 0; r < unit_.rows; ++r) {
      Row& row = rows_[r];
      const int64_t query = query_of(r);
      row.seen = nullptr;
      if (request_.tree_mask != nullptr) {
        const int32_t* from = request_.seen_from.data() + query;
        row.seen = request_.seen.data() + from[0];
        row.last = request_.prefix + from[1] - from[0];
      } else if (request_.causal) {
        row.last = request_.prefix + query + 1;
      } else {
        row.last = request_.prefix + request_.tree;
      }
      row.first = a_.window > 0 ? std::max<int64_t>(0, row.last - a_.window) : 0;
      first_ = std::min(first_, row.first);
      last_ = std::max(last_, row.last);
      by_all_ = {std::max(by_all_.first, row.first), std::min(by_all_.last, row.last)};
    }
  }

  const void* key_row(int64_t i) const {
    return static_cast<const uint8_t*>(a_.k) + dtype_bytes(a_.kv_dtype) *
               (request_.slots[i] * a_.k_stride_token + unit_.kv_head * a_.k_stride_head);
  }
  const void* value_row(int64_t i) const {
    return static_cast<const uint8_t*>(a_.v) + dtype_bytes(a_.kv_dtype) *
               (request_.slots[i] * a_.v_stride_token + unit_.kv_head * a_.v_stride_head);
  }

  void load_queries() {
    const void** rows = room(scratch_.rows, std::max(unit_.rows, int64_t{kBlock}));
    for (int64_t r = 0; r < unit_.rows; ++r)
      rows[r] = static_cast<const uint8_t*>(a_.q) + dtype_bytes(a_.q_dtype) *
                    ((request_.first_query + query_of(r)) * a_.q_stride_token +
                     (unit_.kv_head * group_ + (unit_.first_row + r) % group_) * a_.q_stride_head);
    if (!pairs_) {
      float* out = room(scratch_.queries, unit_.rows * a_.head_dim);
      kernels_.load_rows(a_.q_dtype, rows, unit_.rows, a_.head_dim, a_.head_dim, out);
      return;
    }
    const int64_t pairs = padded_width(a_.head_dim, 32) / 2;
    uint32_t* out = room(scratch_.query_pairs, unit_.rows * pairs);
    std::fill(out, out + unit_.rows * pairs, 0u);
    for (int64_t r = 0; r < unit_.rows; ++r)
      std::memcpy(out + r * pairs, rows[r], static_cast<std::size_t>(a_.head_dim) * 2);
  }

  // Scores of all rows against keys [start, start + count) of the request -> out [R, kBlock], garbage beyond count.
  void score(int64_t start, int64_t count, float* out) {
    const int64_t columns = padded_width(count);
    const void** rows = room(scratch_.rows, kBlock);
    for (int64_t i = 0; i < count; ++i) rows[i] = key_row(start + i);
    if (pairs_) {
      const int64_t pairs = padded_width(a_.head_dim, 32) / 2;
      uint32_t* keys = room(scratch_.key_pairs, pairs * kBlock);
      kernels_.pack_key_pairs(rows, count, a_.head_dim, keys);
      kernels_.gemm_pairs(unit_.rows, columns, pairs, scratch_.query_pairs.data(), pairs, keys, out);
    } else {
      float* keys = room(scratch_.keys, a_.head_dim * kBlock);
      kernels_.pack_keys(a_.kv_dtype, rows, count, a_.head_dim, keys);
      kernels_.gemm(unit_.rows, columns, a_.head_dim, scratch_.queries.data(), a_.head_dim, keys, kBlock, out, kBlock,
                    false);
    }
  }

  void load_values(int64_t start, int64_t count, float* out) {
    const void** rows = room(scratch_.rows, kBlock);
    for (int64_t i = 0; i < count; ++i) rows[i] = value_row(start + i);
    kernels_.load_rows(a_.kv_dtype, rows, count, a_.v_head_dim, padded_, out);
  }

  // Scores [blocks][R, kBlock] and values of the tree's own keys, from which each row picks those it sees.
  void load_tree() {
    const int64_t blocks = (request_.tree + kBlock - 1) / kBlock;
    float* scores = room(scratch_.tree_scores, blocks * unit_.rows * kBlock);
    float* values = room(scratch_.tree_values, blocks * kBlock * padded_);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t start = request_.prefix + block * kBlock;
      const int64_t count = std::min<int64_t>(kBlock, request_.tree - block * kBlock);
      score(start, count, scores + block * unit_.rows * kBlock);
      if (!value_pairs_) load_values(start, count, values + block * kBlock * padded_);
    }
  }

  // One softmax step over ranks [start, start + kBlock). A key that a row does not see has weight 0 there, which is not
  // enough: 0 * NaN is NaN, so the row must not meet that key's value at all.
  void step(int64_t start, const Partial& result) {
    const int64_t listed_from = request_.tree_mask != nullptr ? request_.prefix : INT64_MAX;
    const int64_t shared = std::clamp<int64_t>(std::min(listed_from, last_) - start, 0, kBlock);
    float* scores = room(scratch_.scores, unit_.rows * kBlock);
    if (shared > 0) score(start, shared, scores);
    for (int64_t r = 0; r < unit_.rows; ++r) {
      const Row& row = rows_[r];
      float* own = scores + r * kBlock;
      const int64_t end = std::min(row.last, start + kBlock);
      for (int64_t rank = start + shared; rank < end; ++rank) own[rank - start] = tree_score(r, row, rank);
      kernels_.softmax_step(own, std::max<int64_t>(0, row.first - start), end - start, a_.scale, a_.logit_cap,
                            result.states + r, result.out + r * padded_, padded_);
    }
    const bool listed = start + shared >= listed_from;
    if (value_pairs_) return add_pairs(start, shared, listed, scores, result);
    if (shared > 0) add_values(start, shared, scores, result);
    if (listed) add_tree_values(start, shared, scores, result);
  }

  // Rows that see the same of the first `shared` keys go together.
  void add_values(int64_t start, int64_t shared, const float* weights, const Partial& result) {
    float* values = room(scratch_.values, kBlock * padded_);
    load_values(start, shared, values);
    for (int64_t r = 0, next; r < unit_.rows; r = next) {
      const Range seen = rows_[r].within(start, shared);
      for (next = r + 1; next < unit_.rows; ++next) {
        const Range other = rows_[next].within(start, shared);
        if (other.first != seen.first || other.last != seen.last) break;
      }
      if (seen.first < seen.last)
        kernels_.gemm(next - r, padded_, seen.last - seen.first, weights + r * kBlock + seen.first, kBlock,
                      values + seen.first * padded_, padded_, result.out + r * padded_, padded_, true);
    }
  }

  // The tiles of the pairs want many rows at once: where no key of the block is in a list, the rows go together in spite of
  // keys that some of them do not see, unless there is harm in these.
  void add_pairs(int64_t start, int64_t shared, bool listed, const float* weights, const Partial& result) {
    const void** rows = room(scratch_.rows, kBlock);
    for (int64_t i = 0; i < shared; ++i) rows[i] = value_row(start + i);
    const Range by_all = by_all_.within(start, shared);
    const int64_t behind = std::max(by_all.first, by_all.last);
    if (listed || !kernels_.finite_pairs(rows, by_all.first, a_.v_head_dim) ||
        !kernels_.finite_pairs(rows + behind, shared - behind, a_.v_head_dim))
      return add_pairs_by_query(start, shared, weights, result);
    const int64_t end = padded_width(shared, 32);
    uint32_t* values = room(scratch_.value_pairs, kBlock / 2 * padded_ + 16);
    kernels_.pack_value_pairs(rows, shared, end, a_.v_head_dim, padded_, values);
    kernels_.add_value_pairs(unit_.rows, padded_, end, weights, values, result.out);
  }

  // Behind the first `shared` keys each query has its own list; the rows of one query see the same.
  void add_pairs_by_query(int64_t start, int64_t shared, const float* weights, const Partial& result) {
    static const uint16_t kUnseen[1024] = {};  // the widest value there can be
    uint32_t* values = room(scratch_.value_pairs, kBlock / 2 * padded_ + 16);
    const void** rows = room(scratch_.rows, kBlock);
    const Range by_all = by_all_.within(start, shared);
    const int64_t whole = by_all.first > 0 ? 0 : by_all.last / 2 * 2;  // keys that need packing only once
    for (int64_t i = 0; i < whole; ++i) rows[i] = value_row(start + i);
    kernels_.pack_value_pairs(rows, whole, whole, a_.v_head_dim, padded_, values);
    for (int64_t first = 0, next; first < unit_.rows; first = next) {
      next = std::min(unit_.rows, (query_of(first) + 1) * group_ - unit_.first_row);
      const Row& row = rows_[first];
      const Range seen = row.within(start, kBlock);
      const int64_t end = padded_width(seen.last, 32);
      if (seen.first >= seen.last) continue;
      for (int64_t i = whole; i < seen.last; ++i)
        rows[i] = i < seen.first ? kUnseen
                  : i < shared   ? value_row(start + i)
                                 : value_row(request_.prefix + row.seen[start + i - request_.prefix]);
      if (end > whole)
        kernels_.pack_value_pairs(rows + whole, seen.last - whole, end - whole, a_.v_head_dim, padded_,
                                  values + whole / 2 * padded_);
      kernels_.add_value_pairs(next - first, padded_, end, weights + first * kBlock, values,
                               result.out + first * padded_);
    }
  }

  float tree_score(int64_t r, const Row& row, int64_t rank) const {
    const int64_t j = row.seen[rank - request_.prefix];
    return scratch_.tree_scores[static_cast<std::size_t>(((j / kBlock) * unit_.rows + r) * kBlock + j % kBlock)];
  }

  void add_tree_values(int64_t start, int64_t shared, const float* weights, const Partial& result) {
    const float** seen = room(scratch_.seen_values, kBlock);
    for (int64_t r = 0; r < unit_.rows; ++r) {
      const Row& row = rows_[r];
      const int64_t first = std::max(row.first, start + shared), end = std::min(row.last, start + kBlock);
      int64_t count = 0;
      for (int64_t rank = first; rank < end; ++rank)
        seen[count++] = scratch_.tree_values.data() + row.seen[rank - request_.prefix] * padded_;
      if (count > 0)
        kernels_.add_rows(weights + r * kBlock + first - start, seen, count, result.out + r * padded_, padded_);
    }
  }

  const eyas_cpu_attention& a_;
  const Kernels& kernels_;
  const Unit& unit_;
  const Request& request_;
  Scratch& scratch_;
  const int64_t group_, padded_;
  const bool pairs_, value_pairs_;
  Row rows_[kMaxRows];
  int64_t first_ = 0, last_ = 0;  // over all rows
  Range by_all_{};                // what every row sees; first may be beyond last
};

}  // namespace

int64_t padded_width(int64_t width, int64_t to) { return (width + to - 1) / to * to; }

void clear(const Partial& partial, int64_t rows, int64_t padded) {
  std::fill(partial.states, partial.states + rows, RowState{-FLT_MAX, 0.0f});
  std::fill(partial.out, partial.out + rows * padded, 0.0f);
}

void attend_chunk(const eyas_cpu_attention& a, const Kernels& kernels, const Unit& unit, int64_t chunk,
                  const Partial& result) {
  thread_local Scratch scratch;
  Chunk(a, kernels, unit, scratch).run(chunk, result);
}

}  // namespace eyas::cpu

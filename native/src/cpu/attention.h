// Parts of attention: what a call asks (Request), how it is cut into work (Unit), and the work itself (attend_chunk).
//
// Letters: R rows of a unit (query token x query head of one KV head's group), D head width, Dv value width.
//
// The keys that a query sees form a list; a key's place in it is its rank. Softmax runs over blocks of kBlock ranks and
// chunks of kChunk ranks, joined in order. Both are cut by rank, never by what else is computed beside the query, and
// that is why decode, tree and prefill give the same bits for the same list.
#pragma once

#include <cstdint>
#include <vector>

#include "eyas/cpu_api.h"
#include "kernels.h"

namespace eyas::cpu {

constexpr int64_t kChunk = 8 * kBlock;  // keys per independent piece of a split
constexpr int64_t kMaxRows = 192;       // rows per unit: more would leave the second-level cache
constexpr int64_t kMinRows = 24;        // fewer would not pay for bringing the keys into place

struct Request {
  const int32_t* slots;      // pool slot of each key
  const uint8_t* tree_mask;  // [length, tree] or null
  int64_t first_query;       // row of q
  int64_t length;            // queries
  int64_t tree;              // last keys: the queries' own, or those that the mask chooses from
  int64_t prefix;            // keys before them
  bool causal;
  // With a tree mask: the tree columns that query i sees are seen[seen_from[i] .. seen_from[i + 1]).
  std::vector<int32_t> seen, seen_from;
};

// Checks every argument and every index. Throws Refusal.
std::vector<Request> read_requests(const eyas_cpu_attention& a);

struct Unit {
  const Request* request;
  int64_t kv_head;
  int64_t first_row, rows;  // row r: query r / group, query head kv_head * group + r % group
  int64_t chunks;           // pieces of the longest row's list
};

// One chunk's result for a unit's rows: states [R], out [R, Dv padded].
struct Partial {
  RowState* states;
  float* out;
};

int64_t padded_width(int64_t width, int64_t to = 16);  // the next multiple

// At least `size` elements, what they held is lost. Never shrinks: after the first calls no allocation happens.
template <class T>
T* room(std::vector<T>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) {
    std::vector<T>().swap(buffer);  // first, so that old and new are never there together
    buffer.resize(static_cast<std::size_t>(size));
  }
  return buffer.data();
}

void clear(const Partial& partial, int64_t rows, int64_t padded);
void attend_chunk(const eyas_cpu_attention& a, const Kernels& kernels, const Unit& unit, int64_t chunk,
                  const Partial& result);

}  // namespace eyas::cpu

// Draft trees, a block per request (and per mask row where rows are as long as the context): from the selected entries of
// the draft's score table, or from a mask, to mask, positions and the first-child / next-sibling lists.
// Plain CUDA C++ and nothing else, so that tests can run these kernels on a CPU (tests/native/cuda_on_host.h).
#pragma once
#include <stdint.h>

namespace eyas {

constexpr int kMaxNodes = 256;

struct TreeLinks {
  int64_t *positions, *retrive_index, *next_token, *next_sibling;
};

struct BuildArgs {
  const int64_t *parent_list, *selected_index, *seq_lens;
  int64_t parent_stride;
  int topk, nodes, mode;
  void *mask;
  uint32_t *words;
  TreeLinks links;
  int32_t *invalid;
};

// Bits 0 .. count - 1 of word w.
__device__ inline uint32_t bits_below(int count, int w) {
  const int in_word = count - 32 * w;
  return in_word >= 32 ? ~0u : in_word > 0 ? (1u << in_word) - 1u : 0u;
}

// Node of the entry `flat`, or -1. Entries rise, so that a parent stands before its children.
__device__ inline int find_node(const int64_t *selected, int count, int64_t flat) {
  int lo = 0, hi = count;
  while (lo < hi) {
    const int mid = (lo + hi) / 2;
    if (selected[mid] < flat) lo = mid + 1;
    else hi = mid;
  }
  return lo < count && selected[lo] == flat ? lo + 1 : -1;
}

__device__ inline int64_t prefix_total(const int64_t *seq_lens, int b) {
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int i = threadIdx.x; i < b; i += blockDim.x) mine += seq_lens[i];
  if (mine) atomicAdd(&total, mine);
  __syncthreads();
  return total;
}

// What node i has in the lists that a verify walks.
__device__ inline void write_links(const TreeLinks &to, const int *parent, int b, int i, int n, int64_t length, int depth) {
  int child = -1, sibling = -1;
  for (int j = n - 1; j > i; --j) {
    if (parent[j] == i) child = j;
    if (i && parent[j] == parent[i]) sibling = j;
  }
  const int64_t at = (int64_t)b * n + i;
  to.positions[at] = length + depth;
  to.retrive_index[at] = at;
  to.next_token[at] = child;
  to.next_sibling[at] = sibling;
}

// Rows blockIdx.y, blockIdx.y + gridDim.y, ... of the mask; every block derives the whole tree, which is cheaper than a second launch.
__global__ void __launch_bounds__(kMaxNodes) build_kernel(const BuildArgs p) {
  __shared__ int parent[kMaxNodes];
  __shared__ uint32_t sees[kMaxNodes][kMaxNodes / 32];
  const int b = blockIdx.x, i = threadIdx.x, n = p.nodes, words = (n + 31) / 32;
  const int64_t *selected = p.selected_index + (int64_t)b * (n - 1);
  const int64_t length = p.seq_lens[b];
  bool orphan = false;
  if (i < n) {
    int up = i == 0 ? -1 : 0;
    const int64_t entry = i ? selected[i - 1] : 0, slot = entry < 0 ? -1 : entry / p.topk;
    if (slot != 0) {
      up = slot > 0 && slot < p.parent_stride ? find_node(selected, n - 1, p.parent_list[b * p.parent_stride + slot]) : -1;
      if (up < 0 || up >= i) orphan = true, up = 0;
    }
    parent[i] = up;
    for (int w = 0; w < words; ++w) sees[i][w] = 0;
  }
  orphan = __syncthreads_or(orphan);
  if (p.invalid && i == 0 && blockIdx.y == 0) p.invalid[b] = orphan;
  if (i < n) {
    int depth = 0;
    for (int at = i; at >= 0; at = parent[at]) {
      sees[i][at >> 5] |= 1u << (at & 31);
      depth += at != 0;
    }
    if (blockIdx.y == 0) write_links(p.links, parent, b, i, n, length, depth);
  }
  const int64_t before = p.mode == 0 ? prefix_total(p.seq_lens, b) : 0;
  __syncthreads();
  for (int row = blockIdx.y; row < n; row += gridDim.y) {
    const int64_t at = (int64_t)b * n + row;
    if (p.words && i < words) p.words[at * words + i] = sees[row][i];
    if (p.mode == 0) {
      uint8_t *out = (uint8_t *)p.mask + (int64_t)n * n * b + n * before + row * (length + n);
      for (int64_t c = i; c < length + n; c += blockDim.x) {
        const int j = (int)(c - length);
        out[c] = c < length || (sees[row][j >> 5] >> (j & 31) & 1);
      }
    } else if (p.mode == 1) {
      if (i < n) ((uint8_t *)p.mask)[at * n + i] = sees[row][i >> 5] >> (i & 31) & 1;
    } else if (p.mode == 3) {
      if (i < words) ((uint32_t *)p.mask)[at * words + i] = sees[row][i];
    } else if (i == 0) {
      if (n <= 8) ((uint8_t *)p.mask)[at] = (uint8_t)sees[row][0];
      else if (n <= 16) ((uint16_t *)p.mask)[at] = (uint16_t)sees[row][0];
      else ((uint32_t *)p.mask)[at] = sees[row][0];
    }
  }
}

// Bytes [n, n] of request b to bits in shared memory, and the parent of this thread's node (the last earlier node that it
// sees, or -1), which other threads may read after a barrier.
__device__ inline void read_mask(const uint8_t *mask, int b, int n, uint32_t (&sees)[kMaxNodes][kMaxNodes / 32],
                                 int (&parent)[kMaxNodes]) {
  const int i = threadIdx.x, words = (n + 31) / 32;
  for (int w = 0; i < n && w < words; ++w) sees[i][w] = 0;
  __syncthreads();
  const uint8_t *bytes = mask + (int64_t)b * n * n;
  for (int at = i; at < n * n; at += blockDim.x) {
    const int j = at % n;
    if (bytes[at]) atomicOr(&sees[at / n][j >> 5], 1u << (j & 31));
  }
  __syncthreads();
  if (i < n) {
    int up = -1;
    for (int w = i >> 5; w >= 0 && up < 0; --w) {
      const uint32_t earlier = sees[i][w] & bits_below(i, w);
      if (earlier) up = 32 * w + 31 - __clz(earlier);
    }
    parent[i] = up;
  }
}

__global__ void __launch_bounds__(kMaxNodes)
from_mask_kernel(const uint8_t *mask, const int64_t *seq_lens, int n, const TreeLinks links, int32_t *invalid) {
  __shared__ int parent[kMaxNodes];
  __shared__ uint32_t sees[kMaxNodes][kMaxNodes / 32];
  const int b = blockIdx.x, i = threadIdx.x;
  read_mask(mask, b, n, sees, parent);
  const bool mine = i > 0 && i < n && parent[i] < 0;
  if (mine) parent[i] = 0;
  const bool orphan = __syncthreads_or(mine);
  if (invalid && i == 0) invalid[b] = orphan;
  if (i >= n) return;
  int depth = 0;
  for (int at = i; at > 0; at = parent[at]) ++depth;
  write_links(links, parent, b, i, n, seq_lens[b], depth);
}

// The code of node i's row: what is wrong with it first, in the order in which eyas_cpu_tree_validate looks.
__global__ void __launch_bounds__(kMaxNodes) validate_kernel(const uint8_t *mask, int n, uint8_t *faults) {
  __shared__ int parent[kMaxNodes];
  __shared__ uint32_t sees[kMaxNodes][kMaxNodes / 32];
  const int b = blockIdx.x, i = threadIdx.x, words = (n + 31) / 32;
  read_mask(mask, b, n, sees, parent);
  if (i >= n) return;
  const int up = parent[i];
  uint32_t later = 0, unlike = 0;
  for (int w = 0; w < words; ++w) {
    later |= sees[i][w] & ~bits_below(i + 1, w);
    if (up > 0) unlike |= (sees[i][w] ^ sees[up][w]) & bits_below(up, w);
  }
  const bool self = sees[i][i >> 5] >> (i & 31) & 1;
  faults[(int64_t)b * n + i] = !self ? 1 : later ? 2 : i > 0 && up < 0 ? 3 : unlike ? 4 : 0;
}

}  // namespace eyas

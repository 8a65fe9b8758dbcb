// tree_build: from the selected entries of the draft's score table to mask, positions and the first-child / next-sibling lists.
#include "host.h"

namespace eyas {
namespace {

constexpr int kMaxNodes = 256;

struct BuildArgs {
  const int64_t *parent_list, *selected_index, *seq_lens;
  int64_t parent_stride;
  int topk, nodes, mode;
  void *mask;
  int64_t *positions, *retrive_index, *next_token, *next_sibling;
  int32_t *invalid;
};

// Node of the entry `flat`, or -1. Entries rise, so that a parent stands before its children.
__device__ int find_node(const int64_t *selected, int count, int64_t flat) {
  int lo = 0, hi = count;
  while (lo < hi) {
    const int mid = (lo + hi) / 2;
    if (selected[mid] < flat) lo = mid + 1;
    else hi = mid;
  }
  return lo < count && selected[lo] == flat ? lo + 1 : -1;
}

__device__ int64_t prefix_total(const int64_t *seq_lens, int b) {
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int i = threadIdx.x; i < b; i += blockDim.x) mine += seq_lens[i];
  if (mine) atomicAdd(&total, mine);
  __syncthreads();
  return total;
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
    const int64_t slot = i ? selected[i - 1] / p.topk : 0;
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
    if (blockIdx.y == 0) {
      int child = -1, sibling = -1;
      for (int j = n - 1; j > i; --j) {
        if (parent[j] == i) child = j;
        if (i && parent[j] == parent[i]) sibling = j;
      }
      const int64_t at = (int64_t)b * n + i;
      p.positions[at] = length + depth;
      p.retrive_index[at] = at;
      p.next_token[at] = child;
      p.next_sibling[at] = sibling;
    }
  }
  const int64_t before = p.mode == 0 ? prefix_total(p.seq_lens, b) : 0;
  __syncthreads();
  for (int row = blockIdx.y; row < n; row += gridDim.y) {
    if (p.mode == 0) {
      uint8_t *out = (uint8_t *)p.mask + (int64_t)n * n * b + n * before + row * (length + n);
      for (int64_t c = i; c < length + n; c += blockDim.x) {
        const int j = (int)(c - length);
        out[c] = c < length || (sees[row][j >> 5] >> (j & 31) & 1);
      }
    } else if (p.mode == 1) {
      if (i < n) ((uint8_t *)p.mask)[((int64_t)b * n + row) * n + i] = sees[row][i >> 5] >> (i & 31) & 1;
    } else if (p.mode == 3) {
      if (i < words) ((uint32_t *)p.mask)[((int64_t)b * n + row) * words + i] = sees[row][i];
    } else if (i == 0) {
      const int64_t at = (int64_t)b * n + row;
      if (n <= 8) ((uint8_t *)p.mask)[at] = (uint8_t)sees[row][0];
      else if (n <= 16) ((uint16_t *)p.mask)[at] = (uint16_t)sees[row][0];
      else ((uint32_t *)p.mask)[at] = sees[row][0];
    }
  }
}

}  // namespace
}  // namespace eyas

extern "C" int eyas_tree_build(const int64_t *parent_list, int64_t parent_stride, const int64_t *selected_index,
                               const int64_t *seq_lens, int batch, int topk, int depth, int nodes, int mode, void *mask,
                               int64_t *positions, int64_t *retrive_index, int64_t *retrive_next_token,
                               int64_t *retrive_next_sibling, int32_t *invalid, void *stream) {
  using namespace eyas;
  if (batch < 1) return EYAS_BAD_BATCH;
  if (topk < 1 || depth < 1) return EYAS_BAD_TOPK;
  if (nodes < 1 || nodes > kMaxNodes) return EYAS_BAD_TREE;
  if (mode < 0 || mode > 3 || (mode == 2 && nodes > 32)) return EYAS_BAD_MODE;
  if (!seq_lens || !mask || !positions || !retrive_index || !retrive_next_token || !retrive_next_sibling) return EYAS_BAD_POINTER;
  if ((nodes > 1 && !selected_index) || (parent_stride > 0 && !parent_list)) return EYAS_BAD_POINTER;
  const BuildArgs p = {parent_list, selected_index, seq_lens, parent_stride, topk, nodes, mode, mask, positions, retrive_index,
                       retrive_next_token, retrive_next_sibling, invalid};
  const int rows = mode == 0 ? nodes : 1;
  build_kernel<<<dim3(batch, rows), kMaxNodes, 0, (cudaStream_t)stream>>>(p);
  return (int)cudaGetLastError();
}

// The kernels of tree_kernels.cuh behind the C ABI (cuda_api.h), on the CPU. Of the stream only its being null or not counts:
// not null runs the threads backwards.
#include "cuda_on_host.h"
#include "eyas/cuda_api.h"
#include "tree_kernels.cuh"

using namespace eyas;

static unsigned block_for(int nodes) { return (nodes + 31) / 32 * 32; }

extern "C" {

int eyas_tree_build(const int64_t *parent_list, int64_t parent_stride, const int64_t *selected_index, const int64_t *seq_lens,
                     int batch, int topk, int, int nodes, int mode, void *mask, uint32_t *words, int64_t *positions,
                     int64_t *index, int64_t *child, int64_t *sibling, int32_t *invalid, void *backwards) {
  const BuildArgs p = {parent_list, selected_index, seq_lens, parent_stride, topk, nodes, mode, mask, words,
                       {positions, index, child, sibling}, invalid};
  const unsigned rows = mode == 0 ? nodes : 1;
  on_host::launch({(unsigned)batch, rows, 1}, block_for(nodes), backwards != nullptr, [&] { build_kernel(p); });
  return 0;
}

int eyas_tree_from_mask(const uint8_t *mask, const int64_t *seq_lens, int batch, int nodes, int64_t *positions, int64_t *index,
                         int64_t *child, int64_t *sibling, int32_t *invalid, void *backwards) {
  const TreeLinks links = {positions, index, child, sibling};
  on_host::launch({(unsigned)batch, 1, 1}, block_for(nodes), backwards != nullptr,
                  [&] { from_mask_kernel(mask, seq_lens, nodes, links, invalid); });
  return 0;
}

int eyas_tree_validate(const uint8_t *mask, int batch, int nodes, uint8_t *faults, void *backwards) {
  on_host::launch({(unsigned)batch, 1, 1}, block_for(nodes), backwards != nullptr, [&] { validate_kernel(mask, nodes, faults); });
  return 0;
}
}

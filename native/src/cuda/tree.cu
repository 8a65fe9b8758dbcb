// Launches of tree_build, tree_from_mask and tree_validate.
#include "host.h"
#include "tree_kernels.cuh"

extern "C" int eyas_tree_build(const int64_t *parent_list, int64_t parent_stride, const int64_t *selected_index,
                               const int64_t *seq_lens, int batch, int topk, int depth, int nodes, int mode, void *mask,
                               uint32_t *words, int64_t *positions, int64_t *retrive_index, int64_t *retrive_next_token,
                               int64_t *retrive_next_sibling, int32_t *invalid, void *stream) {
  using namespace eyas;
  if (batch < 1) return EYAS_BAD_BATCH;
  if (topk < 1 || depth < 1) return EYAS_BAD_TOPK;
  if (nodes < 1 || nodes > kMaxNodes) return EYAS_BAD_TREE;
  if (mode < 0 || mode > 3 || (mode == 2 && nodes > 32)) return EYAS_BAD_MODE;
  if (!seq_lens || !mask || !positions || !retrive_index || !retrive_next_token || !retrive_next_sibling) return EYAS_BAD_POINTER;
  if ((nodes > 1 && !selected_index) || (parent_stride > 0 && !parent_list)) return EYAS_BAD_POINTER;
  const BuildArgs p = {parent_list, selected_index, seq_lens, parent_stride, topk, nodes, mode, mask, words,
                       {positions, retrive_index, retrive_next_token, retrive_next_sibling}, invalid};
  const int rows = mode == 0 ? nodes : 1;
  build_kernel<<<dim3(batch, rows), kMaxNodes, 0, (cudaStream_t)stream>>>(p);
  return (int)cudaGetLastError();
}

extern "C" int eyas_tree_from_mask(const uint8_t *tree_mask, const int64_t *seq_lens, int batch, int nodes,
                                   int64_t *positions, int64_t *retrive_index, int64_t *retrive_next_token,
                                   int64_t *retrive_next_sibling, int32_t *invalid, void *stream) {
  using namespace eyas;
  if (batch < 1) return EYAS_BAD_BATCH;
  if (nodes < 1 || nodes > kMaxNodes) return EYAS_BAD_TREE;
  if (!tree_mask || !seq_lens || !positions || !retrive_index || !retrive_next_token || !retrive_next_sibling)
    return EYAS_BAD_POINTER;
  from_mask_kernel<<<batch, kMaxNodes, 0, (cudaStream_t)stream>>>(
      tree_mask, seq_lens, nodes, {positions, retrive_index, retrive_next_token, retrive_next_sibling}, invalid);
  return (int)cudaGetLastError();
}

extern "C" int eyas_tree_validate(const uint8_t *tree_mask, int batch, int nodes, uint8_t *faults, void *stream) {
  using namespace eyas;
  if (batch < 1) return EYAS_BAD_BATCH;
  if (nodes < 1 || nodes > kMaxNodes) return EYAS_BAD_TREE;
  if (!tree_mask || !faults) return EYAS_BAD_POINTER;
  validate_kernel<<<batch, kMaxNodes, 0, (cudaStream_t)stream>>>(tree_mask, nodes, faults);
  return (int)cudaGetLastError();
}

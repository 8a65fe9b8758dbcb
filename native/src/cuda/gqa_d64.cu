// GQA kernels of head dimension 64.
#include "gqa_instances.cuh"

const eyas::GqaShape *eyas::gqa_shapes_64(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Gqa64Rows32, Gqa64Rows64, Gqa64Rows128>::find(q_dtype, kv_dtype, count);
}

// GQA kernels of head dimension 96.
#include "gqa_instances.cuh"

const eyas::GqaShape *eyas::gqa_shapes_96(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Gqa96Rows32, Gqa96Rows128>::find(q_dtype, kv_dtype, count);
}

// GQA kernels of head dimension 256.
#include "gqa_instances.cuh"

const eyas::GqaShape *eyas::gqa_shapes_256(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Gqa256Rows16, Gqa256Rows64>::find(q_dtype, kv_dtype, count);
}

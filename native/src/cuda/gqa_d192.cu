// GQA kernels of head dimension 192.
#include "gqa_instances.cuh"

const eyas::GqaShape *eyas::gqa_shapes_192(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Gqa192Rows16, Gqa192Rows64>::find(q_dtype, kv_dtype, count);
}

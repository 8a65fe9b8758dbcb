// GQA kernels of head dimension 128.
#include "gqa_instances.cuh"

const eyas::GqaShape *eyas::gqa_shapes_128(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Gqa128Rows32, Gqa128Rows64, Gqa128Rows128, Gqa128Rows128Small>::find(q_dtype, kv_dtype, count);
}

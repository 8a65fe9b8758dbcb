// Lean GQA kernels of head dimension 128.
#include "gqa_instances.cuh"

const eyas::GqaShape *eyas::lean_shapes_128(int q_dtype, int kv_dtype, int *count) {
  return LeanTable<Lean128Rows32, Lean128Rows64, Lean128Rows128, Lean128Rows128Small>::find(q_dtype, kv_dtype, count);
}

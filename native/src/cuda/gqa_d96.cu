// GQA kernels of head dimension 96.
#include "gqa_instances.cuh"

namespace eyas {
namespace {
template <bool E> using Rows32 = GqaTile<E, 96, 2, 1, 16>;
template <bool E> using Rows128 = GqaTile<E, 96, 2, 4, 32>;
}  // namespace

const GqaShape *gqa_shapes_96(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Rows32, Rows128>::find(q_dtype, kv_dtype, count);
}

}  // namespace eyas

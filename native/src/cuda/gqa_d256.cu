// GQA kernels of head dimension 256.
#include "gqa_instances.cuh"

namespace eyas {
namespace {
template <bool E> using Rows16 = GqaTile<E, 256, 1, 1, 16, 12>;
template <bool E> using Rows64 = GqaTile<E, 256, 1, 4, 16, 12>;
}  // namespace

const GqaShape *gqa_shapes_256(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Rows16, Rows64>::find(q_dtype, kv_dtype, count);
}

}  // namespace eyas

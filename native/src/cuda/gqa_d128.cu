// GQA kernels of head dimension 128.
#include "gqa_instances.cuh"

namespace eyas {
namespace {
template <bool E> using Rows32 = GqaTile<E, 128, 2, 1, 16, 6>;
template <bool E> using Rows64 = GqaTile<E, 128, 2, 2, 32, 6>;
template <bool E> using Rows128 = GqaTile<E, 128, 2, 4, 32, 6>;
}  // namespace

const GqaShape *gqa_shapes_128(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Rows32, Rows64, Rows128>::find(q_dtype, kv_dtype, count);
}

}  // namespace eyas

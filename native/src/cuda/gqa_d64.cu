// GQA kernels of head dimension 64.
#include "gqa_instances.cuh"

namespace eyas {
namespace {
template <bool E> using Rows32 = GqaTile<E, 64, 2, 1, 32>;
template <bool E> using Rows64 = GqaTile<E, 64, 2, 2, 32>;
template <bool E> using Rows128 = GqaTile<E, 64, 2, 4, 32>;
}  // namespace

const GqaShape *gqa_shapes_64(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Rows32, Rows64, Rows128>::find(q_dtype, kv_dtype, count);
}

}  // namespace eyas

// GQA kernels of head dimension 192.
#include "gqa_instances.cuh"

namespace eyas {
namespace {
template <bool E> using Rows16 = GqaTile<E, 192, 1, 1, 16>;
template <bool E> using Rows64 = GqaTile<E, 192, 1, 4, 32>;
}  // namespace

const GqaShape *gqa_shapes_192(int q_dtype, int kv_dtype, int *count) {
  return GqaTable<Rows16, Rows64>::find(q_dtype, kv_dtype, count);
}

}  // namespace eyas

// Table of the GQA kernel's instances for one head dimension.
#pragma once
#include "gqa_kernel.cuh"
#include "tiles.cuh"
#include "tree_attn_gqa.h"

namespace eyas {

template <class T, bool E4M3, class Tile> int launch_gqa(const AttnParams &p, dim3 grid, int threads, int smem) {
  return launch_attention(gqa_kernel<T, E4M3, Tile>, grid, threads, smem, p);
}

// Tiles: templates over the cache type.
template <template <bool> class... Tiles> struct GqaTable {
  template <class T, bool E4M3> static const GqaShape *make(int *count) {
    static constexpr GqaShape shapes[] = {{Tiles<E4M3>::BM, Tiles<E4M3>::BN, Tiles<E4M3>::GT, Tiles<E4M3>::smem_bytes,
                                           launch_gqa<T, E4M3, Tiles<E4M3>>}...};
    *count = sizeof...(Tiles);
    return shapes;
  }
  static const GqaShape *find(int q_dtype, int kv_dtype, int *count) {
    if (q_dtype == EYAS_BF16) return kv_dtype == EYAS_E4M3 ? make<Bf16, true>(count) : make<Bf16, false>(count);
    return kv_dtype == EYAS_E4M3 ? make<Fp16, true>(count) : make<Fp16, false>(count);
  }
};

}  // namespace eyas

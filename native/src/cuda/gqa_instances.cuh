// Table of the GQA kernel's instances for one head dimension.
#pragma once
#include "gqa_kernel.cuh"
#include "lean_gqa_kernel.cuh"
#include "tiles.cuh"
#include "tree_attn_gqa.h"

namespace eyas {

template <class T, bool E4M3, class Tile> int launch_gqa(const AttnParams &p, dim3 grid, int threads, int smem) {
  return launch_attention(gqa_kernel<T, E4M3, Tile>, grid, threads, smem, p);
}
template <class T, bool E4M3, class Tile> int launch_lean(const AttnParams &p, dim3 grid, int threads, int smem) {
  return launch_attention(lean_gqa_kernel<T, E4M3, Tile>, grid, threads, smem, p);
}
template <class T, bool E4M3, bool LEAN, class Tile> constexpr GqaShape gqa_shape() {
  if constexpr (LEAN) return {Tile::BM, Tile::BN, Tile::GT, Tile::smem_bytes, launch_lean<T, E4M3, Tile>};
  else return {Tile::BM, Tile::BN, Tile::GT, Tile::smem_bytes, launch_gqa<T, E4M3, Tile>};
}

// Tiles: a template over the cache type with a static `make<T, E4M3>(count)` that returns its table.
template <bool LEAN, template <bool> class... Tiles> struct ShapeTable {
  template <class T, bool E4M3> static const GqaShape *make(int *count) {
    static constexpr GqaShape shapes[] = {gqa_shape<T, E4M3, LEAN, Tiles<E4M3>>()...};
    *count = sizeof...(Tiles);
    return shapes;
  }
  static const GqaShape *find(int q_dtype, int kv_dtype, int *count) {
    if (q_dtype == EYAS_BF16) return kv_dtype == EYAS_E4M3 ? make<Bf16, true>(count) : make<Bf16, false>(count);
    return kv_dtype == EYAS_E4M3 ? make<Fp16, true>(count) : make<Fp16, false>(count);
  }
};
template <template <bool> class... Tiles> using GqaTable = ShapeTable<false, Tiles...>;
template <template <bool> class... Tiles> using LeanTable = ShapeTable<true, Tiles...>;

}  // namespace eyas

// Host side of tree_attn_mla: checks, choice of tile and splits, launch.
#include "host.h"
#include "mla_kernel.cuh"
#include "tiles.cuh"

namespace eyas {
namespace {

struct MlaShape {
  int row_tile, tile, threads, stages;
  int (*smem_bytes)(int stages);
  int (*launch)(const AttnParams &p, dim3 grid, int threads, int smem);
};

template <class T, bool E4M3, class Tile> int launch_mla(const AttnParams &p, dim3 grid, int threads, int smem) {
  return launch_attention(mla_kernel<T, E4M3, Tile>, grid, threads, smem, p);
}
template <class T, bool E4M3, class Tile> constexpr MlaShape shape(int stages) {
  return {Tile::BM, Tile::BN, Tile::THREADS, stages, Tile::smem_bytes, launch_mla<T, E4M3, Tile>};
}

// The shapes to choose from, the best first.
constexpr int kShapes = 2;
template <class T> const MlaShape *shapes(bool e4m3) {
  static constexpr MlaShape wide[kShapes] = {shape<T, false, MlaRows64>(kMlaStages), shape<T, false, MlaRows32>(kMlaSmallStages)};
  static constexpr MlaShape narrow[kShapes] = {shape<T, true, MlaRows64E4m3>(kMlaE4m3Stages),
                                               shape<T, true, MlaRows32E4m3>(kMlaSmallE4m3Stages)};
  return e4m3 ? narrow : wide;
}

const MlaShape *shape_for(const eyas_attn &a, int smem_bytes) {
  const bool e4m3 = a.kv_dtype == EYAS_E4M3;
  const MlaShape *s = a.q_dtype == EYAS_BF16 ? shapes<Bf16>(e4m3) : shapes<Fp16>(e4m3);
  for (int i = 0; i < kShapes; ++i)
    if (s[i].smem_bytes(a.stages ? a.stages : s[i].stages) <= smem_bytes && (!a.row_tile || a.row_tile == s[i].row_tile) &&
        (!a.key_tile || a.key_tile == s[i].tile))
      return s + i;
  return nullptr;
}

}  // namespace
}  // namespace eyas

extern "C" int eyas_tree_attn_mla_plan(eyas_attn *a, int sm_count, int smem_bytes) {
  using namespace eyas;
  if (!a) return EYAS_BAD_POINTER;
  if (a->struct_size != sizeof(eyas_attn)) return EYAS_BAD_STRUCT;
  if (a->num_kv_heads != 1 || a->num_q_heads < 1 || a->num_q_heads > 128) return EYAS_BAD_HEADS;
  if (a->max_tree < 1 || a->max_tree > 256) return EYAS_BAD_TREE;
  if (a->batch < 1 || a->batch > 65535) return EYAS_BAD_BATCH;
  if (a->groups < 0 || a->groups > 1 || a->stages < 0 || a->stages == 1 || a->stages > 3 || a->num_splits < 0) return EYAS_BAD_CONFIG;
  Device d = {sm_count, smem_bytes, 0};
  if (!sm_count || !smem_bytes) {
    const int e = current_device(&d);
    if (e) return e;
    if (sm_count) d.sm_count = sm_count;
    if (smem_bytes) d.smem_bytes = smem_bytes;
  }
  const MlaShape *s = shape_for(*a, d.smem_bytes);
  if (!s) return EYAS_BAD_CONFIG;
  a->row_tile = s->row_tile;
  a->key_tile = s->tile;
  a->groups = 1;
  if (!a->stages) a->stages = s->stages;
  const int row_tiles = (a->max_tree * a->num_q_heads + s->row_tile - 1) / s->row_tile;
  const int keys = a->window > 0 ? std::min(a->max_seq_len, a->window + a->max_tree) : a->max_seq_len;
  if (!a->num_splits) a->num_splits = choose_splits(a->batch * row_tiles, d.sm_count, std::max(keys, 1), 2 * s->tile);
  a->workspace_bytes = workspace_bytes(*a, 512);
  return 0;
}

extern "C" int eyas_tree_attn_mla(const eyas_attn *given) {
  using namespace eyas;
  if (!given) return EYAS_BAD_POINTER;
  eyas_attn a = *given;
  int e = check_attention(a, 576, 512);
  if (e) return e;
  Device d;
  e = current_device(&d);
  if (e) return e;
  e = eyas_tree_attn_mla_plan(&a, d.sm_count, d.smem_bytes);
  if (e) return e;
  if (a.workspace_bytes && (!given->workspace || !aligned16(given->workspace) || given->workspace_bytes < a.workspace_bytes))
    return EYAS_BAD_WORKSPACE;
  const MlaShape *s = shape_for(a, d.smem_bytes);
  const int row_tiles = (a.max_tree * a.num_q_heads + s->row_tile - 1) / s->row_tile;
  AttnParams p = make_params(a, 512);
  if (a.kv_dtype == EYAS_E4M3) p.a.v_scale = a.k_scale;  // one cache, one scale
  e = s->launch(p, dim3(row_tiles, a.num_splits, a.batch), s->threads, s->smem_bytes(a.stages));
  if (e || a.num_splits == 1) return e;
  return launch_combine(p, 512, s->tile);
}

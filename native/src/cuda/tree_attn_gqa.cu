// Host side of tree_attn_gqa: checks, choice of tile and splits, launch.
#include "tree_attn_gqa.h"

namespace eyas {
namespace {

const GqaShape *shapes_of(const eyas_attn &a, int *count) {
  switch (a.head_dim) {
    case 64: return gqa_shapes_64(a.q_dtype, a.kv_dtype, count);
    case 96: return gqa_shapes_96(a.q_dtype, a.kv_dtype, count);
    case 128: return gqa_shapes_128(a.q_dtype, a.kv_dtype, count);
    case 192: return gqa_shapes_192(a.q_dtype, a.kv_dtype, count);
    case 256: return gqa_shapes_256(a.q_dtype, a.kv_dtype, count);
    default: return nullptr;
  }
}

// The smallest row tile that holds all packed rows, or the largest there is; of its key tiles the first that leaves room for
// two stages of a full block.
const GqaShape *shape_for(const eyas_attn &a, int smem_bytes) {
  int count = 0;
  const GqaShape *shapes = shapes_of(a, &count), *chosen = nullptr;
  const int rows = a.max_tree * (a.num_q_heads / a.num_kv_heads);
  for (int i = 0; shapes && i < count; ++i) {
    const GqaShape &s = shapes[i];
    if (a.row_tile ? s.row_tile != a.row_tile : s.row_tile < rows && s.row_tile != shapes[count - 1].row_tile) continue;
    if (chosen && s.row_tile != chosen->row_tile) break;
    if (a.key_tile && s.tile != a.key_tile) continue;
    chosen = &s;
    if (s.smem_bytes(256 / s.group_threads, 2) <= smem_bytes) break;
  }
  return chosen;
}

int fill_plan(eyas_attn *a, const GqaShape &shape, int sm_count, int smem_bytes) {
  a->row_tile = shape.row_tile;
  a->key_tile = shape.tile;
  const int most = a->groups ? a->groups : 256 / shape.group_threads, least = a->groups ? a->groups : 1;
  for (int groups = most; groups >= least; groups /= 2) {
    for (int stages = a->stages ? a->stages : shape.tile >= 64 ? 2 : 3; stages >= 2; --stages) {
      if (shape.smem_bytes(groups, stages) > smem_bytes) {
        if (a->stages) break;
        continue;
      }
      a->groups = groups;
      a->stages = stages;
      const int row_tiles = (a->max_tree * (a->num_q_heads / a->num_kv_heads) + shape.row_tile - 1) / shape.row_tile;
      const int keys = a->window > 0 ? std::min(a->max_seq_len, a->window + a->max_tree) : a->max_seq_len;
      if (!a->num_splits)
        a->num_splits = choose_splits(a->batch * a->num_kv_heads * row_tiles, sm_count, std::max(keys, 1),
                                      2 * groups * shape.tile);
      a->workspace_bytes = workspace_bytes(*a, a->head_dim);
      return 0;
    }
  }
  return EYAS_BAD_CONFIG;
}

}  // namespace
}  // namespace eyas

extern "C" int eyas_tree_attn_gqa_plan(eyas_attn *a, int sm_count, int smem_bytes) {
  using namespace eyas;
  if (!a) return EYAS_BAD_POINTER;
  if (a->struct_size != sizeof(eyas_attn)) return EYAS_BAD_STRUCT;
  if (a->num_kv_heads < 1 || a->num_q_heads < 1 || a->num_q_heads % a->num_kv_heads) return EYAS_BAD_HEADS;
  if (a->max_tree < 1 || a->max_tree > 256) return EYAS_BAD_TREE;
  if (a->batch < 1 || a->batch > 65535) return EYAS_BAD_BATCH;
  if (a->groups < 0 || a->stages < 0 || a->stages == 1 || a->stages > 3 || a->num_splits < 0) return EYAS_BAD_CONFIG;
  Device d = {sm_count, smem_bytes, 0};
  if (!sm_count || !smem_bytes) {
    const int e = current_device(&d);
    if (e) return e;
    if (sm_count) d.sm_count = sm_count;
    if (smem_bytes) d.smem_bytes = smem_bytes;
  }
  const GqaShape *shape = shape_for(*a, d.smem_bytes);
  if (!shape) return a->row_tile || a->key_tile ? EYAS_BAD_CONFIG : EYAS_BAD_HEAD_DIM;
  return fill_plan(a, *shape, d.sm_count, d.smem_bytes);
}

extern "C" int eyas_tree_attn_gqa(const eyas_attn *given) {
  using namespace eyas;
  if (!given) return EYAS_BAD_POINTER;
  eyas_attn a = *given;
  if (!a.v) return EYAS_BAD_POINTER;
  int e = check_attention(a, a.head_dim, a.head_dim);
  if (e) return e;
  e = eyas_tree_attn_gqa_plan(&a, 0, 0);
  if (e) return e;
  if (a.workspace_bytes && (!given->workspace || !aligned16(given->workspace) || given->workspace_bytes < a.workspace_bytes))
    return EYAS_BAD_WORKSPACE;
  const GqaShape *shape = shape_for(a, 0);
  const int threads = a.groups * shape->group_threads;
  const int row_tiles = (a.max_tree * (a.num_q_heads / a.num_kv_heads) + shape->row_tile - 1) / shape->row_tile;
  if (a.groups < 1 || threads > 256 || a.num_splits * row_tiles > 65535) return EYAS_BAD_CONFIG;
  const AttnParams p = make_params(a, a.head_dim);
  e = shape->launch(p, dim3(a.num_kv_heads, a.num_splits * row_tiles, a.batch), threads,
                    shape->smem_bytes(a.groups, a.stages));
  if (e || a.num_splits == 1) return e;
  return launch_combine(p, a.head_dim, shape->tile);
}

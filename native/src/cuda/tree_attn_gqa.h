// One instance of the GQA kernel per head dimension, row tile, math and cache type; compiled file by file in gqa_d*.cu.
#pragma once
#include "host.h"

namespace eyas {

struct GqaShape {
  int row_tile, tile;                   // packed rows and keys per tile
  int group_threads;
  int (*smem_bytes)(int groups, int stages);
  int (*launch)(const AttnParams &p, dim3 grid, int threads, int smem);
};

// The shapes of one head dimension, rising in row_tile; *count receives their number.
const GqaShape *gqa_shapes_64(int q_dtype, int kv_dtype, int *count);
const GqaShape *gqa_shapes_96(int q_dtype, int kv_dtype, int *count);
const GqaShape *gqa_shapes_128(int q_dtype, int kv_dtype, int *count);
const GqaShape *gqa_shapes_192(int q_dtype, int kv_dtype, int *count);
const GqaShape *gqa_shapes_256(int q_dtype, int kv_dtype, int *count);

}  // namespace eyas

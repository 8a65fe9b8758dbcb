// Every tile that is compiled, and for which memory. One place, so that the compile-time gates test what is shipped.
#pragma once
#include "tree_attn_gqa.cuh"
#include "tree_attn_mla.cuh"

namespace eyas {

// GQA. The number is that of packed rows; E: e4m3 cache.
template <bool E> using Gqa64Rows32 = GqaTile<E, 64, 2, 1, 32, 4, 1>;
template <bool E> using Gqa64Rows64 = GqaTile<E, 64, 2, 2, 32, 4, 1>;
template <bool E> using Gqa64Rows128 = GqaTile<E, 64, 2, 4, 32, 4, 1>;
template <bool E> using Gqa96Rows32 = GqaTile<E, 96, 2, 1, 16, 4, 1>;
template <bool E> using Gqa96Rows128 = GqaTile<E, 96, 2, 4, 32, 4, 1>;
template <bool E> using Gqa128Rows32 = GqaTile<E, 128, 2, 1, E ? 32 : 16, E ? 2 : 4, 1>;
template <bool E> using Gqa128Rows64 = GqaTile<E, 128, 2, 2, 32, 4, 1>;
template <bool E> using Gqa128Rows128 = GqaTile<E, 128, 2, 4, 64, 4, 1>;  // above 99 KB
template <bool E> using Gqa128Rows128Small = GqaTile<E, 128, 2, 4, 32, 4, 1>;
template <bool E> using Gqa192Rows16 = GqaTile<E, 192, 1, 1, 16, 8, 1>;
template <bool E> using Gqa192Rows64 = GqaTile<E, 192, 1, 4, 32, 8, 1>;
template <bool E> using Gqa256Rows16 = GqaTile<E, 256, 1, 1, 16, 8, 1>;
template <bool E> using Gqa256Rows64 = GqaTile<E, 256, 1, 4, 16, 8, 1>;

// MLA. 64 rows want 227 KB of shared memory (9.0, 10.x), 32 rows fit in 99 KB (8.6, 8.9, 12.x).
using MlaRows64 = MlaTile<false, 2, 2, 2, 32, 2>;
using MlaRows32 = MlaTile<false, 1, 1, 4, 16, 0>;
using MlaRows64E4m3 = MlaTile<true, 2, 2, 2, 32, 0>;
using MlaRows32E4m3 = MlaTile<true, 1, 1, 4, 32, 0>;

// Stages each is used with.
constexpr int kMlaStages = 2, kMlaSmallStages = 3, kMlaE4m3Stages = 3, kMlaSmallE4m3Stages = 2;
static_assert(MlaRows32::smem_bytes(kMlaSmallStages) <= kDeviceSmem && MlaRows32E4m3::smem_bytes(kMlaSmallE4m3Stages) <= kDeviceSmem);
static_assert(Gqa64Rows128<false>::smem_bytes(2, 2) <= kDeviceSmem && Gqa96Rows128<false>::smem_bytes(2, 2) <= kDeviceSmem);
static_assert(Gqa128Rows128Small<false>::smem_bytes(2, 2) <= kDeviceSmem && Gqa192Rows64<false>::smem_bytes(1, 2) <= kDeviceSmem);
static_assert(Gqa256Rows64<false>::smem_bytes(2, 2) <= kDeviceSmem);

}  // namespace eyas

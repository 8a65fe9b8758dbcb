// Keys and values of bf16 brought into pairs, as the bf16 instructions want them.
#pragma once

#include "kernels_avx512.h"

namespace eyas::cpu {
namespace {

// rows[i][d] -> out[d / 2][i], pairs along the head dimension.
inline void pack_key_pairs(const void* const* rows, int64_t count, int64_t width, uint32_t* out) {
  const int64_t pairs = (width + 1) / 2;
  for (int64_t i = 0; i < kBlock; i += 16)
    for (int64_t p = 0; p < pairs; p += 16) {
      const int64_t left = width - 2 * p;
      const __mmask32 inside = left >= 32 ? 0xffffffffu : (1u << left) - 1u;
      __m512i tile[16];
      for (int r = 0; r < 16; ++r)
        tile[r] = i + r < count
                      ? _mm512_maskz_loadu_epi16(inside, static_cast<const uint16_t*>(rows[i + r]) + 2 * p)
                      : _mm512_setzero_si512();
      transpose_16x16(tile);
      for (int r = 0; r < 16; ++r) _mm512_storeu_si512(out + (p + r) * kBlock + i, tile[r]);
    }
}

// rows[i][d] -> out[i / 2][d], pairs along the keys.
[[maybe_unused]] inline void pack_value_pairs(const void* const* rows, int64_t count, int64_t end, int64_t width, int64_t padded,
                             uint32_t* out) {
  alignas(64) static const uint16_t kLow[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < end; i += 2, out += padded)
    for (int64_t d = 0; d < padded; d += 32) {
      const int64_t left = width - d;
      const __mmask32 inside = left >= 32 ? 0xffffffffu : (1u << left) - 1u;
      const auto load = [&](int64_t row) {
        return row < count ? _mm512_maskz_loadu_epi16(inside, static_cast<const uint16_t*>(rows[row]) + d)
                           : _mm512_setzero_si512();
      };
      const __m512i first = load(i), second = load(i + 1);
      _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(first, low, second));
      if (d + 16 < padded) _mm512_storeu_si512(out + d + 16, _mm512_permutex2var_epi16(first, high, second));
    }
}

}  // namespace
}  // namespace eyas::cpu

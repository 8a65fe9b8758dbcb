// The 512-bit vector type, shared by the two AVX-512 files.
#pragma once

#include <immintrin.h>

#include "kernels_simd.h"

namespace eyas::cpu {
namespace {

inline void transpose_16x16(__m512i (&t)[16]) {
  __m512i u[16];
  for (int i = 0; i < 16; i += 2) {
    u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
    u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    t[i] = _mm512_unpacklo_epi64(u[i], u[i + 2]);
    t[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
    t[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
    t[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
  }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      u[i + j] = _mm512_shuffle_i32x4(t[i + j], t[i + j + 4], 0x88);
      u[i + j + 4] = _mm512_shuffle_i32x4(t[i + j], t[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(u[j], u[j + 8], 0x88);
    t[j + 8] = _mm512_shuffle_i32x4(u[j], u[j + 8], 0xdd);
    t[j + 4] = _mm512_shuffle_i32x4(u[j + 4], u[j + 12], 0x88);
    t[j + 12] = _mm512_shuffle_i32x4(u[j + 4], u[j + 12], 0xdd);
  }
}

struct Avx512 {
  using F = __m512;
  static constexpr int kWidth = 16, kRows = 6, kCols = 4;

  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F copy_sign(F size, F sign) {
    return _mm512_or_ps(size, _mm512_and_ps(set(-0.0f), sign));
  }
  static F keep_minus_inf(F from, F to) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(from, set(-__builtin_inff()), _CMP_EQ_OQ), to, from);
  }
  static F times_power_of_two(F x, F n) { return _mm512_scalef_ps(x, n); }
  static F zero_where_less(F from, float limit, F to) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(from, set(limit), _CMP_NLT_UQ), to);
  }
  static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
  static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
  static void transpose(F (&t)[16]) {
    __m512i whole[16];
    for (int i = 0; i < 16; ++i) whole[i] = _mm512_castps_si512(t[i]);
    transpose_16x16(whole);
    for (int i = 0; i < 16; ++i) t[i] = _mm512_castsi512_ps(whole[i]);
  }
  template <int kDtype>
  static F load_as_float(const void* row, int64_t d) {
    if constexpr (kDtype == kFp32) return load(static_cast<const float*>(row) + d);
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(row) + d));
    if constexpr (kDtype == kFp16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  template <int kDtype>
  static float element_as_float(const void* row, int64_t d) { return element<kDtype>(row, d); }
};

inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

}  // namespace
}  // namespace eyas::cpu

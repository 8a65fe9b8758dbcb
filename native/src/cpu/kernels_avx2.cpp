// AVX2 with FMA and F16C. Compiled with those flags, entered only where runs_here() says yes.
#include <immintrin.h>

#include "kernels_simd.h"

namespace eyas::cpu {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kWidth = 8, kRows = 4, kCols = 2;

  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F abs(F a) { return _mm256_andnot_ps(set(-0.0f), a); }
  static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F copy_sign(F size, F sign) { return _mm256_or_ps(size, _mm256_and_ps(set(-0.0f), sign)); }
  static F keep_minus_inf(F from, F to) {
    return _mm256_blendv_ps(to, from, _mm256_cmp_ps(from, set(-__builtin_inff()), _CMP_EQ_OQ));
  }
  static F times_power_of_two(F x, F n) {
    return mul(x, _mm256_castsi256_ps(
                      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
  }
  static F zero_where_less(F from, float limit, F to) {
    return _mm256_andnot_ps(_mm256_cmp_ps(from, set(limit), _CMP_LT_OQ), to);
  }
  static float reduce_max(F x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static float reduce_add(F x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  static void transpose(F (&t)[8]) {
    F u[8];
    for (int i = 0; i < 8; i += 2) {
      u[i] = _mm256_unpacklo_ps(t[i], t[i + 1]);
      u[i + 1] = _mm256_unpackhi_ps(t[i], t[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      t[i] = _mm256_shuffle_ps(u[i], u[i + 2], 0x44);
      t[i + 1] = _mm256_shuffle_ps(u[i], u[i + 2], 0xee);
      t[i + 2] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0x44);
      t[i + 3] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      u[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
      u[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) t[i] = u[i];
  }
  template <int kDtype>
  static F load_as_float(const void* row, int64_t d) {
    if constexpr (kDtype == kFp32) return load(static_cast<const float*>(row) + d);
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(row) + d));
    if constexpr (kDtype == kFp16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  template <int kDtype>
  static float element_as_float(const void* row, int64_t d) { return element<kDtype>(row, d); }
};

bool runs_here() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

const Kernels avx2_kernels = make_kernels<Avx2>("avx2", runs_here);

}  // namespace eyas::cpu

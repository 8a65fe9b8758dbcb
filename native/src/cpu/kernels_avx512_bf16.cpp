// AVX-512 with BF16: scores of bf16 queries and keys from exact products of pairs, summed in float.
#include "pairs_avx512.h"

namespace eyas::cpu {
namespace {

template <int kRows, int kCols>
void pair_tile(int64_t pairs, const uint32_t* a, int64_t lda, const uint32_t* b, float* c) {
  __m512 acc[kRows][kCols];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kCols; ++j) acc[r][j] = _mm512_setzero_ps();
  for (int64_t i = 0; i < pairs; ++i, b += kBlock) {
    __m512bh column[kCols];
    for (int j = 0; j < kCols; ++j) column[j] = (__m512bh)_mm512_loadu_si512(b + j * 16);
    for (int r = 0; r < kRows; ++r) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r * lda + i]));
      for (int j = 0; j < kCols; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], x, column[j]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kCols; ++j) _mm512_storeu_ps(c + r * kBlock + j * 16, acc[r][j]);
}

template <int kCols, int kRows = Avx512::kRows>
void pair_rows(int64_t m, int64_t pairs, const uint32_t* a, int64_t lda, const uint32_t* b, float* c) {
  for (; m >= kRows; m -= kRows, a += kRows * lda, c += kRows * kBlock) pair_tile<kRows, kCols>(pairs, a, lda, b, c);
  if constexpr (kRows > 1)
    if (m > 0) pair_rows<kCols, kRows - 1>(m, pairs, a, lda, b, c);
}

void gemm_pairs(int64_t m, int64_t n, int64_t pairs, const uint32_t* a, int64_t lda, const uint32_t* b, float* c) {
  if (n == kBlock) return pair_rows<kBlock / 16>(m, pairs, a, lda, b, c);
  for (int64_t j = 0; j < n; j += 16) pair_rows<1>(m, pairs, a, lda, b + j, c + j);
}

bool runs_here() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

constexpr Kernels with_pairs() {
  Kernels kernels = make_kernels<Avx512>("avx512_bf16", runs_here);
  kernels.pack_key_pairs = pack_key_pairs;
  kernels.gemm_pairs = gemm_pairs;
  return kernels;
}

}  // namespace

const Kernels avx512_bf16_kernels = with_pairs();

}  // namespace eyas::cpu

// Kernels over a vector type V. Each instruction set's file includes this once, compiled with that set's flags; all is in
// an unnamed namespace and no standard header with inline code is used, so no such code leaks into the common files.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace eyas::cpu {
namespace {

constexpr float kLeastExponent = -87.0f;

enum { kFp32 = 0, kBf16 = 1, kFp16 = 2 };  // as in eyas/cpu_api.h

template <class V, int kRows, int kCols>
void gemm_tile(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  typename V::F acc[kRows][kCols];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kCols; ++j) acc[r][j] = add ? V::load(c + r * ldc + j * V::kWidth) : V::set(0.0f);
  for (int64_t i = 0; i < k; ++i, b += ldb) {
    typename V::F column[kCols];
    for (int j = 0; j < kCols; ++j) column[j] = V::load(b + j * V::kWidth);
    for (int r = 0; r < kRows; ++r) {
      const typename V::F x = V::set(a[r * lda + i]);
      for (int j = 0; j < kCols; ++j) acc[r][j] = V::fma(x, column[j], acc[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kCols; ++j) V::store(c + r * ldc + j * V::kWidth, acc[r][j]);
}

template <class V, int kCols, int kRows = V::kRows>
void gemm_rows(int64_t m, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
               bool add) {
  for (; m >= kRows; m -= kRows, a += kRows * lda, c += kRows * ldc)
    gemm_tile<V, kRows, kCols>(k, a, lda, b, ldb, c, ldc, add);
  if constexpr (kRows > 1)
    if (m > 0) gemm_rows<V, kCols, kRows - 1>(m, k, a, lda, b, ldb, c, ldc, add);
}

template <class V>
void gemm(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
          int64_t ldc, bool add) {
  constexpr int64_t kWide = V::kCols * V::kWidth;
  int64_t j = 0;
  for (; j + kWide <= n; j += kWide) gemm_rows<V, V::kCols>(m, k, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j < n; j += V::kWidth) gemm_rows<V, 1>(m, k, a, lda, b + j, ldb, c + j, ldc, add);
}

// e^x for x <= 0: Cody-Waite reduction, degree 6; exactly 1 at 0; NaN stays NaN. Exactly 0 where the result would be below
// the smallest normal number: arithmetic on such numbers is a hundred times slower.
template <class V>
typename V::F exp_negative(typename V::F x) {
  const typename V::F n = V::round(V::mul(x, V::set(1.44269504f)));
  typename V::F r = V::fma(n, V::set(-0.693359375f), x);
  r = V::fma(n, V::set(2.12194440e-4f), r);
  typename V::F p = V::set(1.9875691500e-4f);
  p = V::fma(p, r, V::set(1.3981999507e-3f));
  p = V::fma(p, r, V::set(8.3334519073e-3f));
  p = V::fma(p, r, V::set(4.1665795894e-2f));
  p = V::fma(p, r, V::set(1.6666665459e-1f));
  p = V::fma(p, r, V::set(5.0000001201e-1f));
  p = V::fma(p, V::mul(r, r), V::add(r, V::set(1.0f)));
  return V::zero_where_less(x, kLeastExponent, V::times_power_of_two(p, n));
}

template <class V>
typename V::F soft_cap(typename V::F x, float cap) {
  const typename V::F y = V::div(x, V::set(cap));
  const typename V::F e = exp_negative<V>(V::mul(V::abs(y), V::set(-2.0f)));
  const typename V::F size = V::div(V::sub(V::set(1.0f), e), V::add(V::set(1.0f), e));
  return V::mul(V::set(cap), V::copy_sign(size, x));
}

template <class V>
float exp_one(float x) {
  float lanes[V::kWidth];
  V::store(lanes, exp_negative<V>(V::set(x)));
  return lanes[0];
}

template <class V>
void scale_row(float* out, float factor, int64_t n) {
  for (int64_t j = 0; j < n; j += V::kWidth) V::store(out + j, V::mul(V::load(out + j), V::set(factor)));
}

template <class V>
void softmax_step(float* scores, int64_t first, int64_t last, float scale, float cap, RowState* state, float* out,
                  int64_t n) {
  constexpr int kSteps = kBlock / V::kWidth;
  if (first >= last) {
    for (int i = 0; i < kSteps; ++i) V::store(scores + i * V::kWidth, V::set(0.0f));
    return;
  }
  for (int64_t i = 0; i < first; ++i) scores[i] = -__builtin_inff();
  for (int64_t i = last; i < kBlock; ++i) scores[i] = -__builtin_inff();
  typename V::F x[kSteps], largest = V::set(state->max);
  for (int i = 0; i < kSteps; ++i) {
    x[i] = V::mul(V::load(scores + i * V::kWidth), V::set(scale));
    if (cap > 0.0f) {
      // The cap would turn a hidden key's -inf into -cap.
      const typename V::F hidden = x[i];
      x[i] = V::keep_minus_inf(hidden, soft_cap<V>(hidden, cap));
    }
    largest = V::max(largest, x[i]);
  }
  const float next_max = V::reduce_max(largest);
  typename V::F sum = V::set(0.0f);
  for (int i = 0; i < kSteps; ++i) {
    x[i] = exp_negative<V>(V::sub(x[i], V::set(next_max)));
    V::store(scores + i * V::kWidth, x[i]);
    sum = V::add(sum, x[i]);
  }
  if (next_max != state->max) {
    const float shrink = exp_one<V>(state->max - next_max);
    scale_row<V>(out, shrink, n);
    state->sum *= shrink;
    state->max = next_max;
  }
  state->sum += V::reduce_add(sum);
}

template <class V>
void add_rows(const float* weights, const float* const* rows, int64_t count, float* out, int64_t n) {
  for (int64_t j = 0; j < n; j += V::kWidth) {
    typename V::F acc = V::load(out + j);
    for (int64_t i = 0; i < count; ++i) acc = V::fma(V::set(weights[i]), V::load(rows[i] + j), acc);
    V::store(out + j, acc);
  }
}

template <class V>
void join(RowState* state, float* out, const RowState* part, const float* part_out, int64_t n) {
  const float top = state->max > part->max ? state->max : part->max;
  const float keep = exp_one<V>(state->max - top), take = exp_one<V>(part->max - top);
  for (int64_t j = 0; j < n; j += V::kWidth)
    V::store(out + j, V::add(V::mul(V::load(out + j), V::set(keep)), V::mul(V::load(part_out + j), V::set(take))));
  state->sum = state->sum * keep + part->sum * take;
  state->max = top;
}

template <class V, int kDtype>
void load_row(const void* row, int64_t width, int64_t padded, float* out) {
  int64_t d = 0;
  for (; d + V::kWidth <= width; d += V::kWidth) V::store(out + d, V::template load_as_float<kDtype>(row, d));
  for (; d < width; ++d) out[d] = V::template element_as_float<kDtype>(row, d);
  for (; d < padded; ++d) out[d] = 0.0f;
}

template <class V>
void load_rows(int32_t dtype, const void* const* rows, int64_t count, int64_t width, int64_t padded, float* out) {
  for (int64_t i = 0; i < count; ++i, out += padded) {
    if (dtype == kFp32) load_row<V, kFp32>(rows[i], width, padded, out);
    else if (dtype == kBf16) load_row<V, kBf16>(rows[i], width, padded, out);
    else load_row<V, kFp16>(rows[i], width, padded, out);
  }
}

template <class V, int kDtype>
void pack_keys_of(const void* const* rows, int64_t count, int64_t width, float* out) {
  constexpr int kWidth = V::kWidth;
  for (int64_t i = 0; i < kBlock; i += kWidth) {
    int64_t d = 0;
    if (i + kWidth <= count)
      for (; d + kWidth <= width; d += kWidth) {
        typename V::F tile[kWidth];
        for (int r = 0; r < kWidth; ++r) tile[r] = V::template load_as_float<kDtype>(rows[i + r], d);
        V::transpose(tile);
        for (int r = 0; r < kWidth; ++r) V::store(out + (d + r) * kBlock + i, tile[r]);
      }
    for (; d < width; ++d)
      for (int r = 0; r < kWidth; ++r)
        out[d * kBlock + i + r] = i + r < count ? V::template element_as_float<kDtype>(rows[i + r], d) : 0.0f;
  }
}

template <class V>
void pack_keys(int32_t dtype, const void* const* rows, int64_t count, int64_t width, float* out) {
  if (dtype == kFp32) pack_keys_of<V, kFp32>(rows, count, width, out);
  else if (dtype == kBf16) pack_keys_of<V, kBf16>(rows, count, width, out);
  else pack_keys_of<V, kFp16>(rows, count, width, out);
}

inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void store_row(int32_t dtype, const float* in, float divisor, int64_t width, void* out) {
  for (int64_t d = 0; d < width; ++d) {
    const float x = in[d] / divisor;
    if (dtype == kFp32) static_cast<float*>(out)[d] = x;
    else if (dtype == kBf16) static_cast<uint16_t*>(out)[d] = bf16_bits(x);
    else static_cast<_Float16*>(out)[d] = static_cast<_Float16>(x);
  }
}

inline float bf16_value(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <int kDtype>
float element(const void* row, int64_t d) {
  if constexpr (kDtype == kFp32) return static_cast<const float*>(row)[d];
  else if constexpr (kDtype == kBf16) return bf16_value(static_cast<const uint16_t*>(row)[d]);
  else return static_cast<float>(static_cast<const _Float16*>(row)[d]);
}

template <class V>
constexpr Kernels make_kernels(const char* name, bool (*runs_here)()) {
  Kernels kernels{};
  kernels.name = name;
  kernels.runs_here = runs_here;
  kernels.load_rows = load_rows<V>;
  kernels.pack_keys = pack_keys<V>;
  kernels.gemm = gemm<V>;
  kernels.softmax_step = softmax_step<V>;
  kernels.add_rows = add_rows<V>;
  kernels.join = join<V>;
  kernels.store_row = store_row;
  return kernels;
}

}  // namespace
}  // namespace eyas::cpu

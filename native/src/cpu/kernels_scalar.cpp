// Plain C++: runs on every machine, and is what the vector versions are judged against.
#include "kernels_simd.h"

namespace eyas::cpu {
namespace {

struct Scalar {
  using F = float;
  static constexpr int kWidth = 1, kRows = 4, kCols = 16;

  static F set(float x) { return x; }
  static F load(const float* p) { return *p; }
  static void store(float* p, F x) { *p = x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }  // b when either is NaN, as the vector instructions
  static F abs(F a) { return __builtin_fabsf(a); }
  static F round(F a) { return __builtin_rintf(a); }
  static F copy_sign(F size, F sign) { return __builtin_copysignf(size, sign); }
  static F keep_minus_inf(F from, F to) { return from == -__builtin_inff() ? from : to; }
  static F times_power_of_two(F x, F n) { return n > -200.0f ? __builtin_ldexpf(x, static_cast<int>(n)) : n; }
  static F zero_where_less(F from, float limit, F to) { return from < limit ? 0.0f : to; }
  static float reduce_max(F x) { return x; }
  static float reduce_add(F x) { return x; }
  static void transpose(F (&)[1]) {}
  template <int kDtype>
  static F load_as_float(const void* row, int64_t d) { return element<kDtype>(row, d); }
  template <int kDtype>
  static float element_as_float(const void* row, int64_t d) { return element<kDtype>(row, d); }
};

bool runs_here() { return true; }

}  // namespace

const Kernels scalar_kernels = make_kernels<Scalar>("scalar", runs_here);

}  // namespace eyas::cpu

// The arithmetic of attention, once per instruction set. Everything above it is the same code for all of them.
#pragma once

#include <cstdint>

namespace eyas::cpu {

constexpr int kBlock = 64;  // keys that share one softmax step; also the width of a packed block of keys

// Running softmax of one query row: the largest score so far and the sum of exponents below it.
struct RowState {
  float max, sum;
};

// Every result element is a sum in one fixed order, whatever the number of rows beside it: the same bits for a row alone
// and for a row among many. Widths `n` and `padded` are multiples of 16.
struct Kernels {
  const char* name;
  bool (*runs_here)();
  // rows[i][0..width) of `dtype` -> out[i][0..padded) as float, zeros beyond width.
  void (*load_rows)(int32_t dtype, const void* const* rows, int64_t count, int64_t width, int64_t padded, float* out);
  // rows[i][0..width) -> out[d][i], i < kBlock, zeros beyond count.
  void (*pack_keys)(int32_t dtype, const void* const* rows, int64_t count, int64_t width, float* out);
  // c[m][n] (+)= a[m][k] b[k][n]
  void (*gemm)(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
               int64_t ldc, bool accumulate);
  // bf16 pairs along the head dimension, or null: rows -> out[d / 2][i], and c[m][n] = a[m][pairs] b[pairs][n]. Rows of b and
  // c are kBlock wide; pairs is a multiple of 16, zeros beyond the width.
  void (*pack_key_pairs)(const void* const* rows, int64_t count, int64_t width, uint32_t* out);
  void (*gemm_pairs)(int64_t m, int64_t n, int64_t pairs, const uint32_t* a, int64_t lda, const uint32_t* b, float* c);
  // bf16 pairs along the keys, or null (then load_rows, gemm and add_rows serve): rows -> out[i / 2][d] for i < end, zeros
  // beyond count, and c[m][n] += weights[m][keys] values[keys / 2][n]; rows of weights are kBlock wide, of c n.
  void (*pack_value_pairs)(const void* const* rows, int64_t count, int64_t end, int64_t width, int64_t padded,
                           uint32_t* out);
  void (*add_value_pairs)(int64_t m, int64_t n, int64_t keys, const float* weights, const uint32_t* values, float* c);
  bool (*finite_pairs)(const void* const* rows, int64_t count, int64_t width);  // none of these bf16 is NaN or infinite
  // One softmax step over scores[first..last) of kBlock: scores become weights (0 outside), state and out are rescaled.
  void (*softmax_step)(float* scores, int64_t first, int64_t last, float scale, float cap, RowState* state, float* out,
                       int64_t n);
  // out[n] += weights[i] * rows[i][n], in order.
  void (*add_rows)(const float* weights, const float* const* rows, int64_t count, float* out, int64_t n);
  // (state, out) <- (state, out) joined with (part, part_out), keys of the part after those of out.
  void (*join)(RowState* state, float* out, const RowState* part, const float* part_out, int64_t n);
  // out[0..width) of `dtype` = in / divisor
  void (*store_row)(int32_t dtype, const float* in, float divisor, int64_t width, void* out);
};

extern const Kernels scalar_kernels;
#ifdef EYAS_X86
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_bf16_kernels;
extern const Kernels amx_bf16_kernels;
#endif

// The best set that runs here, or the one that EYAS_NATIVE_ISA names. Throws Refusal when that cannot run here.
const Kernels& kernels();

}  // namespace eyas::cpu

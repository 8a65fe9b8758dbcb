// hidden_gather: rows of up to 8 sources side by side in one launch, with an optional residual, RMSNorm and cast.
//
// A block holds one row of one source in registers, or, where a statistic spans the row (norm over all sources, a scale per
// row), the whole output row. Every byte is read once and written once.
#include <cuda_fp8.h>

#include "host.h"

namespace eyas {
namespace {

constexpr int kMaxVectors = 16, kMaxThreads = 512;  // 16-byte vectors a thread may hold

template <class T> __device__ __forceinline__ void unpack8(float (&x)[8], uint4 v) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = Math<T>::unpack(w[i]);
    x[2 * i] = f.x, x[2 * i + 1] = f.y;
  }
}
template <class T> __device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  return make_uint4(Math<T>::pack(x[0], x[1]), Math<T>::pack(x[2], x[3]), Math<T>::pack(x[4], x[5]), Math<T>::pack(x[6], x[7]));
}

// Eight elements of a source, the residual added and rounded as the engine's own addition is.
template <class T> __device__ __forceinline__ uint4 load8(const eyas_gather &g, int64_t row, int source, int column) {
  const int64_t at = row * g.source_stride[source] + column * 8;
  uint4 v = *(const uint4 *)((const uint16_t *)g.source[source] + at);
  if (g.residual[source]) {
    float x[8], y[8];
    unpack8<T>(x, v);
    unpack8<T>(y, *(const uint4 *)((const uint16_t *)g.residual[source] + at));
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += y[i];
    v = pack8<T>(x);
  }
  return v;
}

template <bool MAX> __device__ __forceinline__ float block_reduce(float x) {
  __shared__ float part[33];
  for (int i = 16; i > 0; i /= 2) {
    const float y = __shfl_xor_sync(0xffffffffu, x, i);
    x = MAX ? fmaxf(x, y) : x + y;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x < 32) {
    x = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.f;
    for (int i = 16; i > 0; i /= 2) {
      const float y = __shfl_xor_sync(0xffffffffu, x, i);
      x = MAX ? fmaxf(x, y) : x + y;
    }
    if (threadIdx.x == 0) part[32] = x;
  }
  __syncthreads();
  return part[32];
}

__device__ __forceinline__ int64_t source_row(const eyas_gather &g, int row) {
  if (!g.index) return row;
  return g.index_is_i64 ? ((const int64_t *)g.index)[row] : ((const int32_t *)g.index)[row];
}

__device__ __forceinline__ void store8(const eyas_gather &g, int row, int vector, const float (&x)[8], float inverse) {
  const int64_t at = row * g.out_stride + vector * 8;
  if (g.out_dtype == EYAS_E4M3) {
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      h[i] = __nv_cvt_float2_to_fp8x2(make_float2(x[2 * i] * inverse, x[2 * i + 1] * inverse), __NV_SATFINITE, __NV_E4M3);
    *(uint2 *)((uint8_t *)g.out + at) = make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
    return;
  }
  *(uint4 *)((uint16_t *)g.out + at) = g.out_dtype == EYAS_BF16 ? pack8<Bf16>(x) : pack8<Fp16>(x);
}

// Bit-exact copy: no norm, no residual, no cast.
template <int N> __global__ void __launch_bounds__(kMaxThreads) copy_kernel(const __grid_constant__ eyas_gather g) {
  const int row = blockIdx.x, source = blockIdx.y, per = g.width / 8;
  const uint4 *src = (const uint4 *)((const uint16_t *)g.source[source] + source_row(g, row) * g.source_stride[source]);
  uint4 *dst = (uint4 *)((uint16_t *)g.out + row * g.out_stride + (int64_t)source * g.width);
  uint4 x[N];
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (threadIdx.x + i * blockDim.x < per) x[i] = src[threadIdx.x + i * blockDim.x];
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (threadIdx.x + i * blockDim.x < per) dst[threadIdx.x + i * blockDim.x] = x[i];
}

// Makes the compiler unpack the row again at its next use: kept in f32 between uses it would not fit the registers.
template <int N> __device__ __forceinline__ void keep_packed(uint4 (&raw)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(raw[i].x), "+r"(raw[i].y), "+r"(raw[i].z), "+r"(raw[i].w));
}

// 1 / RMS of each statistic of the row: one per source, or one over everything this block holds.
template <class T, int N, int PARTS>
__device__ __forceinline__ void reciprocal_rms(const eyas_gather &g, uint4 (&raw)[N], int total, float *rstd) {
  const int per = g.width / 8, parts = PARTS > 1 && g.norm == 1 ? g.num_sources : 1;
  for (int s = 0; s < parts; ++s) {
    float squares = 0.f;
    keep_packed(raw);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (parts > 1 && (threadIdx.x + i * blockDim.x) / per != s) continue;
      float x[8];
      unpack8<T>(x, raw[i]);
#pragma unroll
      for (int e = 0; e < 8; ++e) squares += x[e] * x[e];
    }
    const float mean = block_reduce<false>(squares) / (float)(parts > 1 ? g.width : total * 8);
    if (threadIdx.x == 0) rstd[s] = rsqrtf(mean + g.eps);
  }
  __syncthreads();
}

// Vector i of the thread after the norm.
template <class T>
__device__ __forceinline__ void finish8(const eyas_gather &g, float (&x)[8], uint4 raw, int first, int v, const float *rstd, bool parts) {
  unpack8<T>(x, raw);
  if (!g.norm) return;
  const int per = g.width / 8;
  float w[8];
  unpack8<T>(w, ((const uint4 *)g.weight)[first * per + v]);
  const float f = rstd[parts ? v / per : 0];
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= f * w[e];
}

template <class T, bool ROW, int N> __global__ void __launch_bounds__(kMaxThreads) gather_kernel(const __grid_constant__ eyas_gather g) {
  __shared__ float rstd[8];
  const int per = g.width / 8, first = ROW ? 0 : blockIdx.y, total = ROW ? per * g.num_sources : per;
  const bool parts = ROW && g.norm == 1;
  const int64_t from = source_row(g, blockIdx.x);
  uint4 raw[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    raw[i] = v < total ? load8<T>(g, from, first + v / per, v % per) : make_uint4(0, 0, 0, 0);
  }
  if (g.norm) reciprocal_rms<T, N, ROW ? 8 : 1>(g, raw, total, rstd);
  float inverse = 1.f / g.out_scale, x[8];
  if (ROW && g.row_scale) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int v = threadIdx.x + i * blockDim.x;
      if (v >= total) break;
      finish8<T>(g, x, raw[i], first, v, rstd, parts);
#pragma unroll
      for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(x[e]));
    }
    const float scale = fmaxf(block_reduce<true>(largest), 1e-12f) / 448.f;
    if (threadIdx.x == 0) g.row_scale[blockIdx.x] = scale;
    inverse = 1.f / scale;
    keep_packed(raw);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v >= total) break;
    finish8<T>(g, x, raw[i], first, v, rstd, parts);
    store8(g, blockIdx.x, first * per + v, x, inverse);
  }
}

using Kernel = void (*)(const eyas_gather);

template <class T, bool ROW> Kernel gather_of(int n) {
  return n <= 1 ? (Kernel)gather_kernel<T, ROW, 1> : n <= 2 ? (Kernel)gather_kernel<T, ROW, 2>
       : n <= 4 ? (Kernel)gather_kernel<T, ROW, 4> : n <= 8 ? (Kernel)gather_kernel<T, ROW, 8>
                                               : (Kernel)gather_kernel<T, ROW, 16>;
}
Kernel copy_of(int n) {
  return n <= 1 ? (Kernel)copy_kernel<1> : n <= 2 ? (Kernel)copy_kernel<2> : n <= 4 ? (Kernel)copy_kernel<4>
       : n <= 7 ? (Kernel)copy_kernel<7> : n <= 8 ? (Kernel)copy_kernel<8> : (Kernel)copy_kernel<16>;
}

int check(const eyas_gather &g) {
  if (g.struct_size != sizeof(eyas_gather)) return EYAS_BAD_STRUCT;
  if (g.num_sources < 1 || g.num_sources > 8) return EYAS_BAD_SOURCES;
  if (g.in_dtype != EYAS_BF16 && g.in_dtype != EYAS_FP16) return EYAS_BAD_DTYPE;
  if (g.out_dtype < EYAS_BF16 || g.out_dtype > EYAS_E4M3) return EYAS_BAD_DTYPE;
  if (g.width < 8 || g.width % 8) return EYAS_BAD_WIDTH;
  if (g.norm < 0 || g.norm > 2) return EYAS_BAD_MODE;
  if (g.rows < 0) return EYAS_BAD_BATCH;
  if ((!g.out && g.rows) || (g.norm && !g.weight)) return EYAS_BAD_POINTER;
  if (!aligned16(g.out) || !aligned16(g.weight)) return EYAS_BAD_ALIGN;
  if (g.out_stride < (int64_t)g.num_sources * g.width || g.out_stride % 8) return EYAS_BAD_STRIDE;
  if (!(g.out_scale > 0.f) || g.eps < 0.f) return EYAS_BAD_SCALE;
  for (int i = 0; i < g.num_sources; ++i) {
    if (!g.source[i] && g.rows) return EYAS_BAD_POINTER;
    if (!aligned16(g.source[i]) || !aligned16(g.residual[i])) return EYAS_BAD_ALIGN;
    if (g.source_stride[i] < g.width || g.source_stride[i] % 8) return EYAS_BAD_STRIDE;
  }
  return 0;
}

}  // namespace
}  // namespace eyas

extern "C" int eyas_hidden_gather(const eyas_gather *given) {
  using namespace eyas;
  if (!given) return EYAS_BAD_POINTER;
  const eyas_gather &g = *given;
  const int e = check(g);
  if (e) return e;
  if (g.rows == 0) return 0;
  bool plain = g.norm == 0 && g.in_dtype == g.out_dtype;
  for (int i = 0; i < g.num_sources; ++i) plain = plain && !g.residual[i];
  const bool row = g.norm == 2 || (g.out_dtype == EYAS_E4M3 && g.row_scale);
  const int vectors = row ? g.num_sources * g.width / 8 : g.width / 8;
  int threads = 128;
  while (threads < kMaxThreads && (vectors + threads - 1) / threads > (plain ? 7 : 4)) threads += 128;
  const int n = (vectors + threads - 1) / threads;
  if (n > kMaxVectors) return EYAS_BAD_WIDTH;
  const bool bf16 = g.in_dtype == EYAS_BF16;
  const Kernel kernel = plain ? copy_of(n) : row ? (bf16 ? gather_of<Bf16, true>(n) : gather_of<Fp16, true>(n))
                                                 : (bf16 ? gather_of<Bf16, false>(n) : gather_of<Fp16, false>(n));
  kernel<<<dim3(g.rows, row ? 1 : g.num_sources), threads, 0, (cudaStream_t)g.stream>>>(g);
  return (int)cudaGetLastError();
}

// What the card can do at most: reading memory, copying memory, bf16 mma.sync. Denominators for verify_attention.py.
#include <stdint.h>

namespace {

__global__ void __launch_bounds__(512) read_kernel(const uint4 *x, int64_t n, uint32_t *sink) {
  uint32_t sum = 0;
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(x + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < n; i += step) {
    const uint4 v = __ldcs(x + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345679u) *sink = sum;
}

__global__ void __launch_bounds__(512) copy_kernel(const uint4 *x, uint4 *y, int64_t n) {
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = __ldcs(x + i + k * step);
#pragma unroll
    for (int k = 0; k < 4; ++k) __stcs(y + i + k * step, v[k]);
  }
  for (; i < n; i += step) __stcs(y + i, __ldcs(x + i));
}

// 16 independent accumulators per warp; operands are the caller's random data, as zeros run faster.
__global__ void __launch_bounds__(256) mma_kernel(const uint32_t *operands, float *out, int rounds) {
  const uint32_t *x = operands + threadIdx.x * 16;
  uint32_t a[2][4], b[4][2];
  float d[16][4] = {};
  for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = x[i];
  for (int i = 0; i < 8; ++i) b[i / 2][i % 2] = x[8 + i];
  for (int r = 0; r < rounds; ++r)
#pragma unroll
    for (int i = 0; i < 16; ++i)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                   : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
                   : "r"(a[i & 1][0]), "r"(a[i & 1][1]), "r"(a[i & 1][2]), "r"(a[i & 1][3]), "r"(b[i / 4][0]), "r"(b[i / 4][1]));
  float sum = 0.f;
  for (int i = 0; i < 64; ++i) sum += d[i / 4][i % 4];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

}  // namespace

extern "C" {
int read_all(const void *x, int64_t bytes, void *sink, int blocks, void *stream) {
  read_kernel<<<blocks, 512, 0, (cudaStream_t)stream>>>((const uint4 *)x, bytes / 16, (uint32_t *)sink);
  return (int)cudaGetLastError();
}
int copy_all(const void *x, void *y, int64_t bytes, int blocks, void *stream) {
  copy_kernel<<<blocks, 512, 0, (cudaStream_t)stream>>>((const uint4 *)x, (uint4 *)y, bytes / 16);
  return (int)cudaGetLastError();
}
// FLOP of one call: blocks * 8 warps * rounds * 16 * 4096.
int mma_all(const void *operands, void *out, int rounds, int blocks, void *stream) {
  mma_kernel<<<blocks, 256, 0, (cudaStream_t)stream>>>((const uint32_t *)operands, (float *)out, rounds);
  return (int)cudaGetLastError();
}
}

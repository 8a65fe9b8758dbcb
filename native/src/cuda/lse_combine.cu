// Merging attention results over disjoint keys by their log-sum-exp: the splits of a launch, and callers' own partial results.
#include "combine.cuh"
#include "host.h"

namespace eyas {

template <class T, int D> int launch_typed(const AttnParams &p, int tile) {
  cudaLaunchConfig_t config = {};
  const int64_t items = (int64_t)p.a.batch * p.a.max_tree * p.a.num_q_heads * ((D + 127) / 128);
  config.gridDim = dim3((unsigned)((items + 7) / 8));
  config.blockDim = dim3(256);
  config.stream = (cudaStream_t)p.a.stream;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = p.a.flags & EYAS_OVERLAP;
  return (int)cudaLaunchKernelEx(&config, combine_kernel<T, D>, p, tile);
}

int launch_combine(const AttnParams &p, int dv, int tile) {
  const bool bf16 = p.a.q_dtype == EYAS_BF16;
  switch (dv) {
    case 64: return bf16 ? launch_typed<Bf16, 64>(p, tile) : launch_typed<Fp16, 64>(p, tile);
    case 96: return bf16 ? launch_typed<Bf16, 96>(p, tile) : launch_typed<Fp16, 96>(p, tile);
    case 128: return bf16 ? launch_typed<Bf16, 128>(p, tile) : launch_typed<Fp16, 128>(p, tile);
    case 192: return bf16 ? launch_typed<Bf16, 192>(p, tile) : launch_typed<Fp16, 192>(p, tile);
    case 256: return bf16 ? launch_typed<Bf16, 256>(p, tile) : launch_typed<Fp16, 256>(p, tile);
    case 512: return bf16 ? launch_typed<Bf16, 512>(p, tile) : launch_typed<Fp16, 512>(p, tile);
    default: return EYAS_BAD_HEAD_DIM;
  }
}

template <class T> __global__ void merge_kernel(const uint16_t *outs, const float *lses, uint16_t *out, float *lse, int n,
                                                int64_t rows, int dim) {
  const int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  float top = -INFINITY, total = 0.f;
  for (int i = 0; i < n; ++i) top = fmaxf(top, lses[i * rows + row]);
  const float ref = top == -INFINITY ? 0.f : top;
  for (int i = 0; i < n; ++i) total += expf(lses[i * rows + row] - ref);
  for (int c = 2 * lane; c < dim; c += 64) {
    float x = 0.f, y = 0.f;
    for (int i = 0; i < n; ++i) {
      const float w = expf(lses[i * rows + row] - ref);
      if (w == 0.f) continue;  // a part without keys may hold anything
      const float2 v = Math<T>::unpack(*(const uint32_t *)(outs + (i * rows + row) * dim + c));
      x += w * v.x, y += w * v.y;
    }
    const float f = total > 0.f ? 1.f / total : 0.f;
    *(uint32_t *)(out + row * dim + c) = Math<T>::pack(x * f, y * f);
  }
  if (lse && lane == 0) lse[row] = total > 0.f ? ref + logf(total) : -INFINITY;
}

}  // namespace eyas

extern "C" int eyas_lse_combine(const void *outs, const float *lses, void *out, float *lse, int n, int64_t rows,
                                int head_dim, int dtype, void *stream) {
  using namespace eyas;
  if (!outs || !lses || !out) return EYAS_BAD_POINTER;
  if (dtype != EYAS_BF16 && dtype != EYAS_FP16) return EYAS_BAD_DTYPE;
  if (head_dim < 2 || head_dim % 2) return EYAS_BAD_HEAD_DIM;
  if (n < 1 || rows < 1 || rows > (int64_t)1 << 33) return EYAS_BAD_BATCH;
  const unsigned blocks = (unsigned)((rows + 7) / 8);
  auto kernel = dtype == EYAS_BF16 ? merge_kernel<Bf16> : merge_kernel<Fp16>;
  kernel<<<blocks, 256, 0, (cudaStream_t)stream>>>((const uint16_t *)outs, lses, (uint16_t *)out, lse, n, rows, head_dim);
  return (int)cudaGetLastError();
}

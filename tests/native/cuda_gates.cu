// The kernels an RTX 50 / RTX PRO Blackwell card (sm_120) would run, in one file for the compile-time gates of test_cuda_gates.py.
#include "gqa_kernel.cuh"
#include "mla_kernel.cuh"

using namespace eyas;
#define GQA(...) \
  template __global__ void eyas::gqa_kernel<Bf16, false, GqaTile<false, __VA_ARGS__>>(const __grid_constant__ AttnParams p); \
  template __global__ void eyas::gqa_kernel<Bf16, true, GqaTile<true, __VA_ARGS__>>(const __grid_constant__ AttnParams p);
#define MLA(E4M3, ...) template __global__ void eyas::mla_kernel<Bf16, E4M3, MlaTile<E4M3, __VA_ARGS__>>(const __grid_constant__ AttnParams p);

#ifdef GATE_SMEM
// The shared memory of a tile as a static array, which ptxas checks against what the chip has (sm_120a: 101,376 bytes).
__global__ void mirror(float *out) {
  __shared__ char tile[GATE_SMEM];
  tile[threadIdx.x] = (char)threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = tile[GATE_SMEM - 1 - threadIdx.x];
}
#else
GATE_KERNELS
#endif

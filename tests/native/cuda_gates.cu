// What test_cuda_gates.py compiles for sm_120 and reads: kernels of tiles.cuh, by GATE.
#include "gqa_kernel.cuh"
#include "mla_kernel.cuh"
#include "tiles.cuh"

using namespace eyas;
#define GQA(TILE) \
  template __global__ void eyas::gqa_kernel<Bf16, false, TILE<false>>(const __grid_constant__ AttnParams p); \
  template __global__ void eyas::gqa_kernel<Bf16, true, TILE<true>>(const __grid_constant__ AttnParams p);
#define MLA(E4M3, TILE) template __global__ void eyas::mla_kernel<Bf16, E4M3, TILE>(const __grid_constant__ AttnParams p);

#if GATE == 1
GQA(Gqa128Rows32)
GQA(Gqa128Rows128Small)
#elif GATE == 2
GQA(Gqa64Rows128)
MLA(false, MlaRows32)
MLA(true, MlaRows32E4m3)
#elif GATE == 4
GQA(Gqa96Rows128)
GQA(Gqa192Rows64)
GQA(Gqa256Rows64)
#elif GATE == 3
// The tiles' shared memory as a static array, which ptxas checks against what the chip has.
template <int BYTES> __global__ void mirror(float *out) {
  __shared__ char tile[BYTES];
  tile[threadIdx.x] = (char)threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = tile[BYTES - 1 - threadIdx.x];
}
#define MIRROR(BYTES) template __global__ void mirror<(BYTES)>(float *);
MIRROR(Gqa128Rows128Small<false>::smem_bytes(2, 2))
MIRROR(MlaRows32::smem_bytes(kMlaSmallStages))
#ifdef EXTRA
MIRROR(EXTRA)
#endif
#endif

// Blocks per multiprocessor of a chip that is not here: prints one number per line "threads registers smem barriers" of standard input.
#include <cuda_occupancy.h>

#include <cstdio>

int main() {
  cudaOccDeviceProp chip;
  chip.computeMajor = 12;
  chip.computeMinor = 0;
  chip.maxThreadsPerBlock = 1024;
  chip.maxThreadsPerMultiprocessor = 1536;
  chip.regsPerBlock = chip.regsPerMultiprocessor = 65536;
  chip.warpSize = 32;
  chip.sharedMemPerBlock = 49152;
  chip.sharedMemPerMultiprocessor = 102400;
  chip.numSms = 188;
  chip.sharedMemPerBlockOptin = 101376;
  chip.reservedSharedMemPerBlock = 1024;
  cudaOccDeviceState state;
  int threads, registers, barriers;
  size_t smem;
  while (std::scanf("%d %d %zu %d", &threads, &registers, &smem, &barriers) == 4) {
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = threads;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = smem;
    kernel.numBlockBarriers = barriers;
    cudaOccResult result;
    const cudaOccError e = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &chip, &kernel, &state, threads, smem);
    std::printf("%d\n", e == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
  }
}

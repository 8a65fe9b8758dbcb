// AVX-512 F, DQ, BW, VL.
#include "kernels_avx512.h"

namespace eyas::cpu {

const Kernels avx512_kernels = make_kernels<Avx512>("avx512", has_avx512);

}  // namespace eyas::cpu

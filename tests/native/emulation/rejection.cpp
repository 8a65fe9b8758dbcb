// verify_rejection behind the C ABI, its kernel's own source run on a CPU.
#undef __shared__
#define __shared__ static  // blocks run one after the other, and none of these arrays is `extern`
#include "verify_rejection.cuh"

extern "C" int eyas_verify_rejection(const eyas_verify *v) {
  using namespace eyas;
  cpu::launch({v->batch, 1, 1}, kSampleThreads, 0, [v] { rejection_kernel(*v); });
  return 0;
}

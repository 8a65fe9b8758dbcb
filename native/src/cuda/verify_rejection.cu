// Launch of verify_rejection.
#include "host.h"
#include "verify_rejection.cuh"

extern "C" int eyas_verify_rejection(const eyas_verify *v) {
  using namespace eyas;
  const int e = check(v);
  if (e) return e;
  const int sampling = check_sampling(v);
  if (sampling) return sampling;
  if (!v->draft_probs) return EYAS_BAD_POINTER;
  rejection_kernel<<<v->batch, kSampleThreads, 0, (cudaStream_t)v->stream>>>(*v);
  return (int)cudaGetLastError();
}

#include "threads.h"

#include <pthread.h>

#include "error.h"

namespace eyas::cpu {
namespace {

std::atomic<int> wanted_threads{0};

// libgomp's threads do not survive a fork: a child that calls for the team of its parent waits for it for ever. Whether there
// is one cannot be known, since torch shares libgomp, so every child of a process that loaded this library has one thread.
std::atomic<bool> forked{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

}  // namespace

int num_threads() {
  if (forked.load(std::memory_order_relaxed)) return 1;
  const int wanted = wanted_threads.load(std::memory_order_relaxed);
  return wanted > 0 ? wanted : omp_get_max_threads();
}

}  // namespace eyas::cpu

extern "C" {

int32_t eyas_cpu_set_threads(int32_t threads) {
  return eyas::cpu::guarded([&] {
    if (threads < 0 || threads > 1024)
      eyas::cpu::refuse(EYAS_CPU_BAD_ARGUMENT, "threads", "%d|0 (as OpenMP) to 1024", threads);
    eyas::cpu::wanted_threads.store(threads, std::memory_order_relaxed);
  });
}

int32_t eyas_cpu_threads(void) { return eyas::cpu::num_threads(); }
}

// Parallel loops whose results do not depend on the number of threads: every task writes its own part.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#include <omp.h>

namespace eyas::cpu {

int num_threads();

// Work that is worth waking one more thread for, in multiply-adds or moved elements: some 20 microseconds.
constexpr int64_t kWorkPerThread = 500'000;

// Calls body(task) once for each task in [0, tasks), on as many threads as `work` (of all tasks together) is worth. The
// first exception of any thread is thrown again here, since none may leave an OpenMP region.
template <class Body>
void parallel_for(int64_t tasks, int64_t work, const Body& body) {
  const int64_t worth = 1 + work / kWorkPerThread, most = tasks < worth ? tasks : worth;
  const int threads = static_cast<int>(most < num_threads() ? most : num_threads());
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  std::mutex failing;
#pragma omp parallel num_threads(threads)
  {
    try {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failing);
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace eyas::cpu

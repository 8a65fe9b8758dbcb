// Runs CUDA kernels of plain C++ on the CPU, one block after the other: each thread of a block is a coroutine that hands
// over at every block-wide barrier. `backwards` runs them from the last to the first: where a barrier is missing, the two orders
// give different results.
#pragma once
#include <stdint.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_host {

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};
inline std::vector<Thread> threads;
inline std::function<void()> body;
inline ucontext_t scheduler;
inline unsigned current;
inline bool vote, result;  // of the barrier that threads wait at, and of the one they left last

inline void pause() { swapcontext(&threads[current].context, &scheduler); }
inline void start() {
  body();
  threads[current].done = true;
  pause();
}

inline void run_block(bool backwards) {
  const unsigned count = (unsigned)threads.size();
  for (Thread &t : threads) {
    getcontext(&t.context);
    t.context.uc_stack = {t.stack.data(), 0, t.stack.size()};
    t.done = false;
    makecontext(&t.context, start, 0);
  }
  for (unsigned finished = 0; finished < count;) {
    finished = 0;
    for (unsigned k = 0; k < count; ++k) {
      current = threadIdx.x = backwards ? count - 1 - k : k;
      if (!threads[current].done) swapcontext(&scheduler, &threads[current].context);
      finished += threads[current].done;
    }
    result = vote, vote = false;
  }
}

template <class Kernel> void launch(dim3 grid, unsigned block, bool backwards, const Kernel &kernel) {
  threads = std::vector<Thread>(block, Thread{{}, std::vector<char>(65536), false});
  body = kernel;
  gridDim = grid, blockDim = {block, 1, 1};
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block(backwards);
}

}  // namespace on_host

inline void __syncthreads() { on_host::pause(); }
inline bool __syncthreads_or(bool mine) {
  on_host::vote |= mine;
  on_host::pause();
  return on_host::result;
}
template <class T> T atomicAdd(T *at, T value) { return (*at += value) - value; }
inline uint32_t atomicOr(uint32_t *at, uint32_t bits) {
  const uint32_t before = *at;
  *at |= bits;
  return before;
}
inline int __clz(uint32_t x) { return __builtin_clz(x); }

// CUDA C++ on a CPU, as far as the attention kernels and verify_rejection need it: every thread of a block is a fiber, the fibers of a warp meet at
// whatever the warp's lanes do together, and warps run at speeds of their own, so that a missing barrier shows. Included before
// anything else.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::max;
using std::min;
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim3 { int x, y, z; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using __half = uint16_t;

namespace eyas {
alignas(1024) char smem[1 << 18];  // what `extern __shared__` names
}

namespace cpu {

// When an asynchronous copy arrives: when it is started, when it is waited for, or at any time between.
enum Arrival { AT_ONCE, LATE, ANY_TIME };
struct Copy {
  char *to;
  const char *from;
  int bytes;
};
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  dim3 index;
  int warp, lane;
  bool done;
  std::vector<std::vector<Copy>> groups;  // of copies, the last one still open
  const void *in[2];                      // what a lane brings to a meeting,
  uint64_t number;
  void *out;                              // and where it wants the result
};
struct Meeting {
  int here = 0, turn = 0;
};

inline std::mt19937 rng;
inline Arrival arrival;
inline std::vector<Thread> threads;
inline Thread *now;
inline dim3 block, block_size, grid;
inline int smem_bytes;
inline Meeting barriers[16], warps[32];
inline ucontext_t scheduler;
inline std::function<void()> kernel;

[[noreturn]] inline void fault(const char *what) {
  std::printf("%s: block %d %d %d, thread %d\n", what, block.x, block.y, block.z, now->index.x);
  std::exit(2);
}
inline void check_shared(const void *at, int bytes) {
  const long offset = (const char *)at - eyas::smem;
  if (offset < 0 || offset + bytes > smem_bytes) fault("outside shared memory");
}
inline void land(const Copy &c) {
  check_shared(c.to, 16);
  if (c.bytes) std::memcpy(c.to, c.from, 16);
  else std::memset(c.to, 0, 16);
}

inline void pause() { swapcontext(&now->context, &scheduler); }
inline void meet(Meeting &m, int count, const std::function<void()> &act = {}) {
  const int turn = m.turn;
  if (++m.here == count) {
    if (act) act();
    m.here = 0;
    ++m.turn;
  }
  while (m.turn == turn) pause();
}
// All lanes of a warp come with what they have; `act` gives each of them its result.
inline void meet_warp(const std::function<void(Thread *lanes)> &act) {
  Thread *lanes = &threads[now->warp * 32];
  meet(warps[now->warp], 32, [&] { act(lanes); });
}

inline void run() {
  kernel();
  now->done = true;
  pause();
}

inline void run_block(int count) {
  std::memset(eyas::smem, 0xff, smem_bytes);  // NaN in every type
  for (Meeting &m : barriers) m = {};
  for (Meeting &m : warps) m = {};
  for (int i = 0; i < count; ++i) {
    Thread &t = threads[i];
    t.index = {i, 0, 0}, t.warp = i / 32, t.lane = i % 32, t.done = false;
    t.groups.assign(1, {});
    t.stack.resize(128 << 10);
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
    makecontext(&t.context, run, 0);
  }
  int left = count, slow = 0;
  for (long round = 0; left; ++round) {
    if (round % 1024 == 0) slow = rng();  // warps that take every eighth turn only, for a while
    for (int i = 0; i < count; ++i) {
      Thread &t = threads[i];
      if (arrival == ANY_TIME && rng() % 32 == 0 && !t.groups.front().empty()) {
        land(t.groups.front().back());
        t.groups.front().pop_back();
      }
      if (t.done || (slow >> t.warp & 1 && round % 8)) continue;
      now = &t;
      swapcontext(&scheduler, &t.context);
      left -= t.done;
    }
    if (round > 10000000) fault("deadlock");
  }
}

inline void launch(dim3 blocks, int count, int bytes, std::function<void()> f) {
  kernel = std::move(f), grid = blocks, block_size = {count, 1, 1}, smem_bytes = bytes;
  if (bytes > (int)sizeof(eyas::smem)) std::exit(3);
  threads.resize(1024);
  for (block.z = 0; block.z < grid.z; ++block.z)
    for (block.y = 0; block.y < grid.y; ++block.y)
      for (block.x = 0; block.x < grid.x; ++block.x) run_block(count);
}

template <class T> T shuffle(T x, int from) {
  T result;
  now->in[0] = &x, now->number = from, now->out = &result;
  meet_warp([](Thread *lanes) {
    for (int i = 0; i < 32; ++i) std::memcpy(lanes[i].out, lanes[lanes[i].number & 31].in[0], sizeof(T));
  });
  return result;
}

}  // namespace cpu

#define threadIdx (cpu::now->index)
#define blockIdx (cpu::block)
#define blockDim (cpu::block_size)
#define gridDim (cpu::grid)

inline void __syncthreads() { cpu::meet(cpu::barriers[0], cpu::block_size.x); }
inline void __syncwarp() { cpu::meet(cpu::warps[cpu::now->warp], 32); }
template <class T> T __shfl_xor_sync(uint32_t, T x, int mask) { return cpu::shuffle(x, cpu::now->lane ^ mask); }
template <class T> T __shfl_sync(uint32_t, T x, int from) { return cpu::shuffle(x, from); }
inline bool __any_sync(uint32_t, bool x) {
  bool result;
  cpu::now->number = x, cpu::now->out = &result;
  cpu::meet_warp([](cpu::Thread *lanes) {
    const bool any = std::any_of(lanes, lanes + 32, [](const cpu::Thread &t) { return t.number; });
    for (int i = 0; i < 32; ++i) *(bool *)lanes[i].out = any;
  });
  return result;
}
inline float __fdividef(float x, float y) { return x / y; }
inline uint32_t __byte_perm(uint32_t lo, uint32_t hi, uint32_t selector) {
  const uint64_t bytes = (uint64_t)hi << 32 | lo;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, int shift) {
  return (uint32_t)(((uint64_t)hi << 32 | lo) >> (shift & 31));
}

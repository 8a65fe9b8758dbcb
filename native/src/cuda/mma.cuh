// What the kernels build from the instructions: operand types, the order of widened values, rows of shared memory.
#pragma once
#include <instructions.cuh>

namespace eyas {

// Waits for a ring's oldest tile, when each tile is one copy group and `stages` (2 or 3) of them are kept going.
__device__ __forceinline__ void copy_wait_oldest(int stages) {
  if (stages == 2) copy_wait<0>();
  else copy_wait<1>();
}

// Math of attention: e4m3 caches are widened to fp16, the only type the hardware widens them to.
template <class T, bool E4M3> struct MathOver { using Type = Math<T>; };
template <class T> struct MathOver<T, true> { using Type = Math<Fp16>; };

// Two keys' pairs of values (as ldmatrix.trans delivers bytes): the keys' first values to `even`, their second ones to `odd`.
__device__ __forceinline__ void widen_pairs(uint32_t &even, uint32_t &odd, uint32_t v) { widen(even, odd, __byte_perm(v, 0, 0x3120)); }

// 16 components of a query (x, then y) as fp16 in the order in which widen() delivers a key's: pairs 0, 2, 4, 6, then 1, 3, 5, 7.
template <class T> __device__ __forceinline__ void order_as_widened(uint4 &x, uint4 &y) {
  uint32_t w[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 f = Math<T>::unpack(w[i]);
    w[i] = Math<Fp16>::pack(f.x, f.y);
  }
  x = make_uint4(w[0], w[2], w[4], w[6]);
  y = make_uint4(w[1], w[3], w[5], w[7]);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Shared-memory rows of CHUNKS 16-byte chunks, stored so that 8 consecutive rows' equal chunks hit 8 different bank groups:
// what the row's start already spreads is left, the rest (`key`) is XORed into the chunk's low bits. Bases are 128-byte aligned.
template <int CHUNKS> struct Rows {
  static_assert(CHUNKS % 2 == 0);
  static constexpr int MASK = CHUNKS % 8 == 0 ? 7 : CHUNKS % 8 == 4 ? 3 : 1, BYTES = CHUNKS * 16;
  static __device__ __forceinline__ int key(int row) { return (row >> (MASK == 7 ? 0 : MASK == 3 ? 1 : 2)) & MASK; }
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) { return row * BYTES + ((chunk ^ key(row)) << 4); }
  // From the address of chunk c of a row to that of chunk c + step, where step is a constant with none of c's bits: at most
  // one XOR, the rest folds into the instruction's immediate offset.
  static __device__ __forceinline__ uint32_t along(uint32_t address, int step) {
    return (address ^ ((step & MASK) << 4)) + (step & ~MASK) * 16;
  }
};

}  // namespace eyas

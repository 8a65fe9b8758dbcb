// Every instruction that CUDA C++ has no name for (sm_80 to sm_121): mma.sync, ldmatrix, cp.async, conversions. Nothing newer.
// tests/native/emulation has a file of the same name for a CPU.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace eyas {

struct Bf16 {};
struct Fp16 {};

__device__ __forceinline__ uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// 16 bytes to shared memory: `bytes` (16 or 0) of them from global memory, the rest zeros.
__device__ __forceinline__ void copy16(uint32_t smem, const void *global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(smem), "l"(global), "r"(bytes));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::); }
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory"); }

// Brings the 128 bytes at `at` to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void *at) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(at)); }

// The thread's number, read anew: kept since the start it would cost a register.
__device__ __forceinline__ int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t smem, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(smem), "r"(x) : "memory");
}

// Barrier of `threads` threads under number `id` (1..15), so that groups of warps run on their own.
__device__ __forceinline__ void group_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem));
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem));
}

template <class T> struct Math;
template <> struct Math<Bf16> {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  }
};
template <> struct Math<Fp16> {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t v) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&v));
  }
};

// Four e4m3 values as fp16: bytes 0 and 1 to `lo`, 2 and 3 to `hi`. Exact.
__device__ __forceinline__ void widen(uint32_t &lo, uint32_t &hi, uint32_t v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{.reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.rn.f16x2.e4m3x2 %0, a;\n cvt.rn.f16x2.e4m3x2 %1, b;}\n" : "=r"(lo), "=r"(hi) : "r"(v));
#else
  // Exponent and mantissa keep their bits, the bias difference (15 - 7) is one multiplication by 2^8, which also normalises
  // e4m3's subnormals.
  const uint32_t x = __byte_perm(v, 0, 0x1404), y = __byte_perm(v, 0, 0x3424);
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(lo) : "r"((x & 0x80008000u) | ((x >> 1) & 0x3f803f80u)), "r"(0x5c005c00u), "r"(0x80008000u));
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(hi) : "r"((y & 0x80008000u) | ((y >> 1) & 0x3f803f80u)), "r"(0x5c005c00u), "r"(0x80008000u));
#endif
}
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(x));
  return r;
}

// Lets the next kernel of the stream start its prologue; its wait_previous() still waits for this grid's memory.
__device__ __forceinline__ void allow_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::);
#endif
}
__device__ __forceinline__ void wait_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

}  // namespace eyas

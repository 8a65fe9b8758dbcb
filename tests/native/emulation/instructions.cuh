// The GPU's instructions of native/src/cuda/instructions.cuh on a CPU; see cuda.h. PTX's fragment layouts, no speed.
#pragma once

namespace eyas {

struct Bf16 {};
struct Fp16 {};

inline uint32_t smem_address(const void *p) { return (uint32_t)((const char *)p - smem); }
inline int thread_again() { return threadIdx.x; }
inline void prefetch_line(const void *) {}
inline void store_shared(uint32_t to, uint32_t x) {
  cpu::check_shared(smem + to, 4);
  std::memcpy(smem + to, &x, 4);
}
inline void allow_next() {}
inline void wait_previous() {}
inline float exp2_fast(float x) { return exp2f(x); }

inline void copy16(uint32_t to, const void *from, int bytes) {
  if (to % 16 || (uintptr_t)from % 16) cpu::fault("misaligned copy");
  const cpu::Copy c = {smem + to, (const char *)from, bytes};
  if (cpu::arrival == cpu::AT_ONCE) cpu::land(c);
  else cpu::now->groups.back().push_back(c);
}
inline void copy_commit() { cpu::now->groups.emplace_back(); }
template <int N> void copy_wait() {
  auto &groups = cpu::now->groups;
  for (; groups.size() > N + 1; groups.erase(groups.begin()))
    for (const cpu::Copy &c : groups.front()) cpu::land(c);
}
inline void group_barrier(int id, int threads) { cpu::meet(cpu::barriers[id], threads); }

// Lane 8 m + i brings the address of row i of matrix m; lane l gets elements 2 (l % 4) and the next of row l / 4 (of a column
// when transposed).
template <bool TRANSPOSED> void load_matrices(uint32_t (&r)[4], uint32_t at) {
  if (at % 16) cpu::fault("misaligned ldmatrix");
  cpu::now->number = at, cpu::now->out = r;
  cpu::meet_warp([](cpu::Thread *lanes) {
    for (int m = 0; m < 4; ++m) {
      uint16_t x[8][8];
      for (int i = 0; i < 8; ++i) {
        const char *row = smem + lanes[8 * m + i].number;
        cpu::check_shared(row, 16);
        std::memcpy(x[i], row, 16);
      }
      for (int l = 0; l < 32; ++l) {
        const int i = l / 4, j = l % 4 * 2;
        const uint32_t lo = TRANSPOSED ? x[j][i] : x[i][j], hi = TRANSPOSED ? x[j + 1][i] : x[i][j + 1];
        ((uint32_t *)lanes[l].out)[m] = lo | hi << 16;
      }
    }
  });
}
inline void ldmatrix4(uint32_t (&r)[4], uint32_t at) { load_matrices<false>(r, at); }
inline void ldmatrix4_trans(uint32_t (&r)[4], uint32_t at) { load_matrices<true>(r, at); }

template <class T> struct Scalar;
template <> struct Scalar<Bf16> {
  static float widen(uint16_t h) {
    const uint32_t u = (uint32_t)h << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
  static uint16_t round(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return std::isnan(f) ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
};
template <> struct Scalar<Fp16> {
  static float widen(uint16_t h) {
    _Float16 x;
    std::memcpy(&x, &h, 2);
    return (float)x;
  }
  static uint16_t round(float f) {
    const _Float16 x = (_Float16)f;
    uint16_t h;
    std::memcpy(&h, &x, 2);
    return h;
  }
};
inline float e4m3_value(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const float f = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
  return (x & 127) == 127 ? NAN : x & 128 ? -f : f;
}

template <class T> struct Math {
  static uint32_t pack(float lo, float hi) { return Scalar<T>::round(lo) | (uint32_t)Scalar<T>::round(hi) << 16; }
  static float2 unpack(uint32_t v) { return {Scalar<T>::widen((uint16_t)v), Scalar<T>::widen((uint16_t)(v >> 16))}; }
  // m16n8k16: lane l holds row l / 4 (and 8 more) of A and D, column l / 4 of B, and elements 2 (l % 4) and the next.
  static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    cpu::now->in[0] = a, cpu::now->in[1] = b, cpu::now->out = d;
    cpu::meet_warp([](cpu::Thread *lanes) {
      float A[16][16], B[8][16];
      for (int l = 0; l < 32; ++l) {
        const uint32_t *x = (const uint32_t *)lanes[l].in[0], *y = (const uint32_t *)lanes[l].in[1];
        for (int i = 0; i < 4; ++i) {
          const float2 f = unpack(x[i]);
          float *at = &A[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8];
          at[0] = f.x, at[1] = f.y;
        }
        for (int i = 0; i < 2; ++i) {
          const float2 f = unpack(y[i]);
          float *at = &B[l / 4][l % 4 * 2 + i * 8];
          at[0] = f.x, at[1] = f.y;
        }
      }
      for (int l = 0; l < 32; ++l)
        for (int i = 0; i < 4; ++i) {
          float *sum = (float *)lanes[l].out + i;
          const float *x = A[l / 4 + i / 2 * 8], *y = B[l % 4 * 2 + i % 2];
          for (int k = 0; k < 16; ++k) *sum += x[k] * y[k];
        }
    });
  }
};
inline void widen(uint32_t &lo, uint32_t &hi, uint32_t v) {
  lo = Math<Fp16>::pack(e4m3_value((uint8_t)v), e4m3_value((uint8_t)(v >> 8)));
  hi = Math<Fp16>::pack(e4m3_value((uint8_t)(v >> 16)), e4m3_value((uint8_t)(v >> 24)));
}

}  // namespace eyas

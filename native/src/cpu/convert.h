// Element types of the ABI and their conversion to and from float, round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "error.h"

namespace eyas::cpu {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  _Float16 value;
};
struct E4m3 {
  uint8_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Fp16 x) { return static_cast<float>(x.value); }
inline float to_float(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, Fp16& out) { out.value = static_cast<_Float16>(x); }
inline void from_float(float x, Bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Saturated, infinities too; NaN stays NaN.
inline void from_float(float x, E4m3& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t code;
  if (magnitude > 0x7f800000u) {
    code = 0x7f;
  } else if (magnitude >= 0x43e00000u) {  // 448, the largest
    code = 0x7e;
  } else if (magnitude >= 0x3c800000u) {  // 2^-6, the smallest normal: keep 3 bits of the mantissa, bias 127 becomes 7
    code = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  } else {  // multiples of 2^-9, which is the last bit of a float at 2^14
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += 16384.0f;
    std::memcpy(&code, &shifted, sizeof code);
    code -= 0x46800000u;
  }
  out.bits = static_cast<uint8_t>((bits >> 24 & 0x80u) | code);
}

inline int64_t dtype_bytes(int32_t dtype) { return dtype == EYAS_CPU_FP32 ? 4 : 2; }

// Calls body with a null pointer of the element type that `dtype` names.
template <class Body>
void with_dtype(int32_t dtype, const char* argument, const Body& body) {
  switch (dtype) {
    case EYAS_CPU_FP32: return body(static_cast<float*>(nullptr));
    case EYAS_CPU_BF16: return body(static_cast<Bf16*>(nullptr));
    case EYAS_CPU_FP16: return body(static_cast<Fp16*>(nullptr));
    default: refuse(EYAS_CPU_BAD_ARGUMENT, argument, "dtype code %d|0 fp32, 1 bf16 or 2 fp16", dtype);
  }
}

// The same where e4m3 may be named, too.
template <class Body>
void with_stored_dtype(int32_t dtype, const char* argument, const Body& body) {
  if (dtype == EYAS_CPU_E4M3) return body(static_cast<E4m3*>(nullptr));
  with_dtype(dtype, argument, body);
}

}  // namespace eyas::cpu

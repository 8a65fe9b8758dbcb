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

}  // namespace eyas::cpu

// A vector of L float lanes under one set of names. Each translation unit of kernels is compiled
// once per instruction set, with HR_ISA the namespace of its code; nothing here may have external
// linkage outside that namespace, or the linker could hand AVX-512 code to a processor without it.
#pragma once
#include <stdint.h>
#include <string.h>

#define HR_INLINE static inline __attribute__((always_inline))

namespace HR_ISA {

// The same pointer, with its origin hidden from the compiler, which else keeps one a row.
template <class T> HR_INLINE const T* opaque(const T* p) {
  asm("" : "+r"(p));
  return p;
}
HR_INLINE float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
HR_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
HR_INLINE int32_t four_bytes(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return four;
}
HR_INLINE float bfloat_to_float(uint16_t x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }
HR_INLINE uint16_t float_to_bfloat(float x) {  // to nearest, ties to even
  const uint32_t bits = float_to_bits(x);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
HR_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | ((rest & 0x3ff) << 13));
  if (rest >= 0x400) return bits_to_float(sign | ((rest << 13) + (112u << 23)));
  const float tiny = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
  return bits_to_float(sign | float_to_bits(tiny));
}
HR_INLINE uint16_t float_to_half(float x) {  // to nearest, ties to even
  const uint32_t bits = float_to_bits(x), rest = bits & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  if (rest > 0x7f800000) return sign | 0x7e00;
  if (rest >= 0x477ff000) return sign | 0x7c00;  // rounds past 65504
  if (rest < 0x38800000) {                       // subnormal: the adder rounds to 2^-24
    const float moved = bits_to_float(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(moved) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13));
}

}  // namespace HR_ISA

#if defined(HR_AVX512)
#include "simd_avx512.h"
#elif defined(HR_AVX2)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace HR_ISA {

// e^x, |relative error| < 2e-7; x is clamped to [-87, 88]. Cody and Waite's reduction by ln 2,
// then the Taylor polynomial of degree 7 on |r| <= ln 2 / 2.
HR_INLINE F exponential(F x) {
  x = fmin(set1(88.0f), fmax(set1(-87.0f), x));  // in this order a NaN passes through
  const I n = nearest(mul(x, set1(1.44269504088896341f)));
  const F k = to_float(n);
  F r = fma(k, set1(-0.693359375f), x);
  r = fma(k, set1(2.12194440e-4f), r);
  F y = set1(1.98412698e-4f);
  y = fma(y, r, set1(1.38888889e-3f));
  y = fma(y, r, set1(8.33333333e-3f));
  y = fma(y, r, set1(4.16666667e-2f));
  y = fma(y, r, set1(1.66666667e-1f));
  y = fma(y, r, set1(0.5f));
  y = fma(y, r, set1(1.0f));
  y = fma(y, r, set1(1.0f));
  return mul(y, power_of_2(n));
}

HR_INLINE F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exponential(sub(zero(), x)))); }

// cap * tanh(x / cap), by tanh(z) = 2 sigmoid(2 z) - 1. |error| < 3e-7 cap.
HR_INLINE F capped(F x, float cap) {
  const F half = sub(sigmoid(mul(x, set1(2.0f / cap))), set1(0.5f));
  return mul(half, set1(2.0f * cap));
}

}  // namespace HR_ISA

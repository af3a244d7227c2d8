// Four lanes of the compiler's own vector types: SSE2 on any x86-64, NEON on any AArch64.
#pragma once
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace HR_ISA {

typedef float F __attribute__((vector_size(16)));    // float lanes
typedef int32_t I __attribute__((vector_size(16)));  // int32 lanes
typedef uint32_t B __attribute__((vector_size(16))); // the same lanes as 4 bytes each
typedef int16_t S __attribute__((vector_size(16)));
typedef uint16_t U __attribute__((vector_size(16)));
typedef int8_t C __attribute__((vector_size(16)));

constexpr int L = 4;
constexpr int kMaxRows = 4;  // rows of activations that one call of a tile kernel takes
constexpr int kRowsAside = 4;  // rows whose sums two vectors of weights share registers with
constexpr int kQ8Zero = 0;   // dot4_q8 takes signed weights

HR_INLINE F zero() { return F{0, 0, 0, 0}; }
HR_INLINE F set1(float x) { return F{x, x, x, x}; }
HR_INLINE F load(const float* p) {
  F x;
  memcpy(&x, p, sizeof x);
  return x;
}
HR_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }
HR_INLINE F add(F a, F b) { return a + b; }
HR_INLINE F sub(F a, F b) { return a - b; }
HR_INLINE F mul(F a, F b) { return a * b; }
HR_INLINE F div(F a, F b) { return a / b; }
HR_INLINE F fma(F a, F b, F c) { return a * b + c; }
HR_INLINE F fmax(F a, F b) { return a > b ? a : b; }
HR_INLINE F fmin(F a, F b) { return a < b ? a : b; }
HR_INLINE F fabs(F a) { return reinterpret_cast<F>(reinterpret_cast<B>(a) & 0x7fffffffu); }
HR_INLINE float sum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
HR_INLINE float highest(F a) {
  const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}

// Magnitudes compared as integers: a NaN is above infinity and is never lost.
HR_INLINE F magnitude_max(F magnitudes, F a) {
  const I x = reinterpret_cast<I>(magnitudes), y = reinterpret_cast<I>(fabs(a));
  return reinterpret_cast<F>(x > y ? x : y);
}
HR_INLINE float highest_magnitude(F magnitudes) {
  const I a = reinterpret_cast<I>(magnitudes);
  const int32_t x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return bits_to_float(static_cast<uint32_t>(x > y ? x : y));
}

HR_INLINE I izero() { return I{0, 0, 0, 0}; }
HR_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
// Nearest, ties to even: adding 1.5 * 2^23 leaves the integer in the low bits. |a| < 2^22.
HR_INLINE I nearest(F a) {
  const F magic = set1(12582912.0f);
  return reinterpret_cast<I>(a + magic) - reinterpret_cast<I>(magic);
}
HR_INLINE I iadd(I a, I b) { return a + b; }
HR_INLINE F power_of_2(I n) { return reinterpret_cast<F>((n + 127) << 23); }
HR_INLINE void store_i8(int8_t* p, I a) {
  for (int i = 0; i < L; ++i) p[i] = static_cast<int8_t>(a[i]);
}
HR_INLINE F load_i8(const int8_t* p) { return to_float(I{p[0], p[1], p[2], p[3]}); }
HR_INLINE F load_u8(const uint8_t* p) { return to_float(I{p[0], p[1], p[2], p[3]}); }
HR_INLINE F load_f16(const uint16_t* p) {
  return F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
HR_INLINE void store_f16(uint16_t* p, F a) {
  for (int i = 0; i < L; ++i) p[i] = float_to_half(a[i]);
}
HR_INLINE F load_bf16(const uint16_t* p) {
  return reinterpret_cast<F>(B{p[0], p[1], p[2], p[3]} << 16);
}
HR_INLINE void store_bf16(uint16_t* p, F a) {
  for (int i = 0; i < L; ++i) p[i] = float_to_bfloat(a[i]);
}

HR_INLINE B load_bytes(const uint8_t* p) {
  B x;
  memcpy(&x, p, sizeof x);
  return x;
}
HR_INLINE B band(B a, B b) { return a & b; }
HR_INLINE B bor(B a, B b) { return a | b; }
HR_INLINE B bset1(uint8_t x) {
  const uint32_t four = 0x01010101u * x;
  return B{four, four, four, four};
}
template <int N> HR_INLINE B right(B a) { return reinterpret_cast<B>(reinterpret_cast<U>(a) >> N); }
template <int N> HR_INLINE B left(B a) { return reinterpret_cast<B>(reinterpret_cast<U>(a) << N); }
HR_INLINE B load_q8(const uint8_t* p) { return load_bytes(p); }
template <int J> HR_INLINE F byte_to_float(B a) {
  return to_float(reinterpret_cast<I>((a >> (8 * J)) & 0xffu));
}
template <int J> HR_INLINE F q8_to_float(B a) {
  return to_float(reinterpret_cast<I>(a << (24 - 8 * J)) >> 24);
}

HR_INLINE B four_times(const int8_t* p) {
  const uint32_t four = static_cast<uint32_t>(four_bytes(p));
  return B{four, four, four, four};
}
#if defined(__ARM_FEATURE_DOTPROD)
HR_INLINE I dot_q8(I acc, B weights, B activations) {
  return reinterpret_cast<I>(vdotq_s32(reinterpret_cast<int32x4_t>(acc),
                                       reinterpret_cast<int8x16_t>(weights),
                                       reinterpret_cast<int8x16_t>(activations)));
}
#else
// Products of bytes fit 16 bits; the two of each lane are then added in 32.
HR_INLINE I pair_sums(S products) {
  const I both = reinterpret_cast<I>(products);
  return ((both << 16) >> 16) + (both >> 16);
}
HR_INLINE I dot_q8(I acc, B weights, B activations) {
  const S a = reinterpret_cast<S>(activations), w = reinterpret_cast<S>(weights);
  return acc + pair_sums(((w << 8) >> 8) * ((a << 8) >> 8)) + pair_sums((w >> 8) * (a >> 8));
}
#endif
// acc + the sum over each lane's 4 bytes of weight (0..127) x activation (signed).
HR_INLINE I dot(I acc, B weights, B activations) { return dot_q8(acc, weights, activations); }
HR_INLINE I dot4_q8(I acc, B weights, const int8_t* activations) {
  return dot_q8(acc, weights, four_times(activations));
}
HR_INLINE I dot4(I acc, B weights, const int8_t* activations) {
  return dot4_q8(acc, weights, activations);
}

// Lane i of the result is the sum of the lanes of p[i].
HR_INLINE F sum_each(const F* p) { return F{sum(p[0]), sum(p[1]), sum(p[2]), sum(p[3])}; }

// The L x L floats at p, rows for columns.
HR_INLINE void transpose(float* p) {
  float q[L * L];
  memcpy(q, p, sizeof q);
  for (int i = 0; i < L; ++i) {
    for (int j = 0; j < L; ++j) p[i * L + j] = q[j * L + i];
  }
}

}  // namespace HR_ISA


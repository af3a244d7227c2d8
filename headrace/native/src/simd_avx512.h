// One zmm register: 16 lanes. Needs AVX-512 F, BW, DQ, VL and VNNI.
#pragma once
#include <immintrin.h>

namespace HR_ISA {

using F = __m512;   // float lanes
using I = __m512i;  // int32 lanes
using B = __m512i;  // the same lanes as 4 bytes each

constexpr int L = 16;
constexpr int kMaxRows = 16;   // rows of activations that one call of a tile kernel takes
constexpr int kRowsAside = 8;  // rows whose sums two vectors of weights share registers with
constexpr int kQ8Zero = 128;   // vpdpbusd takes unsigned weights: signed ones are moved up by this

HR_INLINE F zero() { return _mm512_setzero_ps(); }
HR_INLINE F set1(float x) { return _mm512_set1_ps(x); }
HR_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
HR_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
HR_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
HR_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
HR_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
HR_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
HR_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
HR_INLINE F fmax(F a, F b) { return _mm512_max_ps(a, b); }
HR_INLINE F fmin(F a, F b) { return _mm512_min_ps(a, b); }
HR_INLINE F fabs(F a) { return _mm512_abs_ps(a); }
HR_INLINE float sum(F a) { return _mm512_reduce_add_ps(a); }
HR_INLINE float highest(F a) { return _mm512_reduce_max_ps(a); }
// Magnitudes compared as integers: a NaN is above infinity and is never lost.
HR_INLINE F magnitude_max(F magnitudes, F a) {
  return _mm512_castsi512_ps(
      _mm512_max_epi32(_mm512_castps_si512(magnitudes), _mm512_castps_si512(fabs(a))));
}
HR_INLINE float highest_magnitude(F magnitudes) {
  return bits_to_float(
      static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_castps_si512(magnitudes))));
}

HR_INLINE I izero() { return _mm512_setzero_si512(); }
HR_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
HR_INLINE I nearest(F a) { return _mm512_cvtps_epi32(a); }
HR_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
HR_INLINE F power_of_2(I n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
HR_INLINE void store_i8(int8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}
HR_INLINE F load_i8(const int8_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
}
HR_INLINE F load_u8(const uint8_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(raw));
}
HR_INLINE F load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HR_INLINE void store_f16(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
HR_INLINE F load_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
HR_INLINE void store_bf16(uint16_t* p, F a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  up = _mm512_srli_epi32(up, 16);
  up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(up));
}

HR_INLINE B load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
HR_INLINE B band(B a, B b) { return _mm512_and_si512(a, b); }
HR_INLINE B bor(B a, B b) { return _mm512_or_si512(a, b); }
HR_INLINE B bset1(uint8_t x) { return _mm512_set1_epi8(static_cast<char>(x)); }
template <int N> HR_INLINE B right(B a) { return _mm512_srli_epi16(a, N); }
template <int N> HR_INLINE B left(B a) { return _mm512_slli_epi16(a, N); }
HR_INLINE B load_q8(const uint8_t* p) { return _mm512_xor_si512(load_bytes(p), bset1(0x80)); }
template <int J> HR_INLINE F byte_to_float(B a) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(a, 8 * J), _mm512_set1_epi32(0xff)));
}
template <int J> HR_INLINE F q8_to_float(B a) { return byte_to_float<J>(a); }

struct __attribute__((packed, may_alias)) Four {
  int32_t value;
};
// acc + the sum over each lane's 4 bytes of weight (unsigned) x activation (signed).
HR_INLINE I dot4(I acc, B weights, const int8_t* activations) {
  // The intrinsic would broadcast in an instruction of its own, and issue is what limits.
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(acc)
      : "v"(weights), "m"(*reinterpret_cast<const Four*>(activations)));
  return acc;
}
HR_INLINE I dot4_q8(I acc, B weights, const int8_t* activations) {
  return dot4(acc, weights, activations);
}

HR_INLINE B four_times(const int8_t* p) { return _mm512_set1_epi32(four_bytes(p)); }
// As dot4, of activations that fill a vector.
HR_INLINE I dot(I acc, B weights, B activations) {
  // Volatile keeps the order of the source: the compiler's own costs a third of the speed.
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weights), "v"(activations));
  return acc;
}
HR_INLINE I dot_q8(I acc, B weights, B activations) { return dot(acc, weights, activations); }

// Lane i of the result is the sum of the lanes of p[i].
HR_INLINE F sum_each(const F* p) {
  F a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    a[i] = add(_mm512_shuffle_f32x4(p[i], p[i + 8], 0x44), _mm512_shuffle_f32x4(p[i], p[i + 8], 0xee));
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = add(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    c[i] = add(_mm512_unpacklo_ps(b[i], b[i + 2]), _mm512_unpackhi_ps(b[i], b[i + 2]));
  }
  const F d = add(_mm512_unpacklo_ps(c[0], c[1]), _mm512_unpackhi_ps(c[0], c[1]));
  return _mm512_shuffle_f32x4(d, d, 0xd8);  // its quarters are in the order 0, 2, 1, 3
}

// The L x L floats at p, rows for columns.
HR_INLINE void transpose(float* p) {
  F a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = load(p + 16 * i);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + j]: columns j, j + 4, ... of rows i .. i + 3
    a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    const F low = _mm512_shuffle_f32x4(a[j], a[j + 4], 0x88);      // columns j, j + 8
    const F odd = _mm512_shuffle_f32x4(a[j], a[j + 4], 0xdd);      // columns j + 4, j + 12
    const F high = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0x88);
    const F rest = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0xdd);
    store(p + 16 * j, _mm512_shuffle_f32x4(low, high, 0x88));
    store(p + 16 * (j + 8), _mm512_shuffle_f32x4(low, high, 0xdd));
    store(p + 16 * (j + 4), _mm512_shuffle_f32x4(odd, rest, 0x88));
    store(p + 16 * (j + 12), _mm512_shuffle_f32x4(odd, rest, 0xdd));
  }
}

}  // namespace HR_ISA

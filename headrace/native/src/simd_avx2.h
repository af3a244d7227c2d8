// One ymm register: 8 lanes. Needs AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

namespace HR_ISA {

using F = __m256;   // float lanes
using I = __m256i;  // int32 lanes
using B = __m256i;  // the same lanes as 4 bytes each

constexpr int L = 8;
constexpr int kMaxRows = 4;  // rows of activations that one call of a tile kernel takes
constexpr int kRowsAside = 4;  // rows whose sums two vectors of weights share registers with
constexpr int kQ8Zero = 0;   // dot4_q8 takes signed weights

HR_INLINE F zero() { return _mm256_setzero_ps(); }
HR_INLINE F set1(float x) { return _mm256_set1_ps(x); }
HR_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
HR_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
HR_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
HR_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
HR_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
HR_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
HR_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
HR_INLINE F fmax(F a, F b) { return _mm256_max_ps(a, b); }
HR_INLINE F fmin(F a, F b) { return _mm256_min_ps(a, b); }
HR_INLINE F fabs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
HR_INLINE float sum(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
HR_INLINE float highest(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// Magnitudes compared as integers: a NaN is above infinity and is never lost.
HR_INLINE F magnitude_max(F magnitudes, F a) {
  return _mm256_castsi256_ps(
      _mm256_max_epi32(_mm256_castps_si256(magnitudes), _mm256_castps_si256(fabs(a))));
}
HR_INLINE float highest_magnitude(F magnitudes) {
  const __m256i a = _mm256_castps_si256(magnitudes);
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1));
  return bits_to_float(static_cast<uint32_t>(_mm_cvtsi128_si32(x)));
}

HR_INLINE I izero() { return _mm256_setzero_si256(); }
HR_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
HR_INLINE I nearest(F a) { return _mm256_cvtps_epi32(a); }
HR_INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
HR_INLINE F power_of_2(I n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
HR_INLINE void store_i8(int8_t* p, I a) {
  __m128i x = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(x, x));
}
HR_INLINE F load_i8(const int8_t* p) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
}
HR_INLINE F load_u8(const uint8_t* p) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw));
}
HR_INLINE F load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HR_INLINE void store_f16(uint16_t* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
HR_INLINE F load_bf16(const uint16_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
HR_INLINE void store_bf16(uint16_t* p, F a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  up = _mm256_srli_epi32(up, 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), nan);
  const __m128i low = _mm256_castsi256_si128(up), high = _mm256_extracti128_si256(up, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
}

HR_INLINE B load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
HR_INLINE B band(B a, B b) { return _mm256_and_si256(a, b); }
HR_INLINE B bor(B a, B b) { return _mm256_or_si256(a, b); }
HR_INLINE B bset1(uint8_t x) { return _mm256_set1_epi8(static_cast<char>(x)); }
template <int N> HR_INLINE B right(B a) { return _mm256_srli_epi16(a, N); }
template <int N> HR_INLINE B left(B a) { return _mm256_slli_epi16(a, N); }
HR_INLINE B load_q8(const uint8_t* p) { return load_bytes(p); }
template <int J> HR_INLINE F byte_to_float(B a) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(a, 8 * J), _mm256_set1_epi32(0xff)));
}
template <int J> HR_INLINE F q8_to_float(B a) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 24 - 8 * J), 24));
}

HR_INLINE B four_times(const int8_t* p) { return _mm256_set1_epi32(four_bytes(p)); }
// acc + the sum over each lane's 4 bytes of weight (0..127) x activation (signed).
HR_INLINE I dot(I acc, B weights, B activations) {
  const __m256i pairs = _mm256_maddubs_epi16(weights, activations);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// The same for signed weights: |w| x (a with the sign of w). Needs a > -128.
HR_INLINE I dot_q8(I acc, B weights, B activations) {
  return dot(acc, _mm256_abs_epi8(weights), _mm256_sign_epi8(activations, weights));
}
HR_INLINE I dot4(I acc, B weights, const int8_t* activations) {
  return dot(acc, weights, four_times(activations));
}
HR_INLINE I dot4_q8(I acc, B weights, const int8_t* activations) {
  return dot_q8(acc, weights, four_times(activations));
}

// Lane i of the result is the sum of the lanes of p[i].
HR_INLINE F sum_each(const F* p) {
  const F a = _mm256_hadd_ps(_mm256_hadd_ps(p[0], p[1]), _mm256_hadd_ps(p[2], p[3]));
  const F b = _mm256_hadd_ps(_mm256_hadd_ps(p[4], p[5]), _mm256_hadd_ps(p[6], p[7]));
  return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// The L x L floats at p, rows for columns.
HR_INLINE void transpose(float* p) {
  float q[L * L];
  memcpy(q, p, sizeof q);
  for (int i = 0; i < L; ++i) {
    for (int j = 0; j < L; ++j) p[i * L + j] = q[j * L + i];
  }
}

}  // namespace HR_ISA

// Block layouts as in pack.cpp. L blocks are worked on at once, a lane each.
//
// Four bits: x = d u + m with 0 <= u <= 15. The sum of squared errors has no closed minimum over d, m
// and the integers u, so several distances between levels are tried; for the u that each gives, d
// and m are those of least squares.
#include "quantise.h"

#include "simd.h"

namespace HR_ISA {

namespace {

constexpr int kTries = 12;
constexpr float kLevels = 15.0f;   // the highest of four bits
constexpr float kWidest = 14.4f;   // the range of a block in distances, first try
constexpr float kNarrower = 0.2f;  // more of them a try
constexpr float kTiny = 1e-30f;    // no division by zero

// 32 values of each of L blocks.
struct Blocks {
  F x[kBlock];
};

// One number of each of L blocks.
struct Each {
  float of[L];
};

HR_INLINE void keep(F x, Each* out) { store(out->of, x); }
HR_INLINE F all(const Each& x) { return load(x.of); }

HR_INLINE F rounded_to_half(F x) {
  uint16_t halves[L];
  store_f16(halves, x);
  return load_f16(halves);
}

void put_half(uint8_t* out, float x) {
  const uint16_t half = float_to_half(x);
  memcpy(out, &half, sizeof half);
}

// 0 for each block whose values are all finite, else NaN.
HR_INLINE F broken(const Blocks& v) {
  F total = zero();
  for (int i = 0; i < kBlock; ++i) total = fma(v.x[i], zero(), total);
  return total;
}

HR_INLINE F inverse_of(F d) { return div(set1(1.0f), fmax(d, set1(kTiny))); }

// d, then 32 signed bytes. d is the largest magnitude over 127, rounded so that none is cut.
struct EightBits {
  static constexpr int kBytes = 34;

  static void write(const Blocks& v, int count, uint8_t* out) {
    F high = zero();
    for (int i = 0; i < kBlock; ++i) high = fmax(high, fabs(v.x[i]));
    Each top, bad, d;
    keep(high, &top);
    keep(broken(v), &bad);
    for (int b = 0; b < L; ++b) {
      uint16_t half = float_to_half(top.of[b] / 127.0f);
      if (half_to_float(half) * 127.4f < top.of[b]) ++half;
      d.of[b] = half_to_float(half) + bad.of[b];
    }
    for (int b = 0; b < count; ++b) put_half(out + b * kBytes, d.of[b]);
    const F inverse = inverse_of(all(d));
    for (int i = 0; i < kBlock; ++i) {
      int8_t q[L];
      store_i8(q, nearest(fmin(set1(127.0f), fmax(set1(-127.0f), mul(v.x[i], inverse)))));
      for (int b = 0; b < count; ++b) out[b * kBytes + 2 + i] = static_cast<uint8_t>(q[b]);
    }
  }
};

HR_INLINE I level_of(F x, F low, F inverse) {
  return nearest(fmin(set1(kLevels), fmax(zero(), mul(sub(x, low), inverse))));
}

struct Lines {
  F d, m;
};

// d and m of the least squares for the levels at distances of 1 / inverse from `low` up.
HR_INLINE Lines fit(const Blocks& v, F low, F inverse) {
  F levels = zero(), squares = zero(), values = zero(), products = zero();
  for (int i = 0; i < kBlock; ++i) {
    const F u = to_float(level_of(v.x[i], low, inverse));
    levels = add(levels, u);
    squares = fma(u, u, squares);
    values = add(values, v.x[i]);
    products = fma(u, v.x[i], products);
  }
  const F n = set1(kBlock);
  // An integer, at least 31 unless all levels are equal; then so is what it divides, up to rounding.
  const F spread = fmax(sub(mul(n, squares), mul(levels, levels)), set1(1.0f));
  const F d = div(sub(mul(n, products), mul(levels, values)), spread);
  const F m = mul(sub(values, mul(d, levels)), set1(1.0f / kBlock));
  return {rounded_to_half(fmax(d, zero())), rounded_to_half(m)};
}

HR_INLINE F squared_errors(const Blocks& v, Lines line) {
  const F inverse = inverse_of(line.d);
  F total = zero();
  for (int i = 0; i < kBlock; ++i) {
    const F u = to_float(level_of(v.x[i], line.m, inverse));
    const F rest = sub(v.x[i], fma(u, line.d, line.m));
    total = fma(rest, rest, total);
  }
  return total;
}

// d, m, then 16 bytes: value i in the low nibble of byte i, value i + 16 in the high one.
struct FourBits {
  static constexpr int kBytes = 20;

  static Lines search(const Blocks& v) {
    F high = v.x[0], low = v.x[0];
    for (int i = 1; i < kBlock; ++i) {
      high = fmax(high, v.x[i]);
      low = fmin(low, v.x[i]);
    }
    const F range = sub(high, low);
    Lines line = {rounded_to_half(mul(range, set1(1.0f / kLevels))), rounded_to_half(low)};
    Each least, d, m;
    keep(squared_errors(v, line), &least);
    keep(line.d, &d);
    keep(line.m, &m);
    for (int i = 0; i < kTries; ++i) {
      const F distances = set1(kWidest + kNarrower * static_cast<float>(i));
      line = fit(v, low, mul(distances, inverse_of(range)));
      Each left, new_d, new_m;
      keep(squared_errors(v, line), &left);
      keep(line.d, &new_d);
      keep(line.m, &new_m);
      for (int b = 0; b < L; ++b) {
        const bool better = left.of[b] < least.of[b];
        least.of[b] = better ? left.of[b] : least.of[b];
        d.of[b] = better ? new_d.of[b] : d.of[b];
        m.of[b] = better ? new_m.of[b] : m.of[b];
      }
    }
    return {all(d), all(m)};
  }

  static void write(const Blocks& v, int count, uint8_t* out) {
    const Lines line = search(v);
    Each d, m;
    keep(add(line.d, broken(v)), &d);
    keep(line.m, &m);
    for (int b = 0; b < count; ++b) {
      put_half(out + b * kBytes, d.of[b]);
      put_half(out + b * kBytes + 2, m.of[b]);
    }
    const F inverse = inverse_of(line.d);
    for (int i = 0; i < kBlock / 2; ++i) {
      int8_t low[L], high[L];
      store_i8(low, level_of(v.x[i], line.m, inverse));
      store_i8(high, level_of(v.x[i + kBlock / 2], line.m, inverse));
      for (int b = 0; b < count; ++b) {
        out[b * kBytes + 4 + i] = static_cast<uint8_t>((low[b] & 15) | (high[b] & 15) << 4);
      }
    }
  }
};

float float_at(int source, const uint8_t* raw, int64_t i) {
  uint32_t word = 0;
  memcpy(&word, raw + i * (source == kF32 ? 4 : 2), source == kF32 ? 4 : 2);
  if (source == kF32) return bits_to_float(word);
  const uint16_t half = static_cast<uint16_t>(word);
  return source == kF16 ? half_to_float(half) : bfloat_to_float(half);
}

template <class Format> void write_all(int source, int64_t blocks, const uint8_t* raw, uint8_t* out) {
  const int64_t block_bytes = kBlock * (source == kF32 ? 4 : 2);
  for (int64_t first = 0; first < blocks; first += L) {
    const int count = static_cast<int>(blocks - first < L ? blocks - first : L);
    float turned[kBlock][L] = {};
    for (int b = 0; b < count; ++b) {
      for (int i = 0; i < kBlock; ++i) turned[i][b] = float_at(source, raw + b * block_bytes, i);
    }
    Blocks v;
    for (int i = 0; i < kBlock; ++i) v.x[i] = load(turned[i]);
    Format::write(v, count, out);
    raw += count * block_bytes;
    out += count * Format::kBytes;
  }
}

}  // namespace

bool quantise_rows(int type, int source, int columns, const uint8_t* raw, int count, uint8_t* out) {
  const bool plain = source == kF32 || source == kF16 || source == kBF16;
  if (!plain || columns % kBlock || (type != kQ8_0 && type != kQ4_1)) return false;
  const int64_t blocks = static_cast<int64_t>(count) * (columns / kBlock);
  if (type == kQ8_0) write_all<EightBits>(source, blocks, raw, out);
  if (type == kQ4_1) write_all<FourBits>(source, blocks, raw, out);
  return true;
}

}  // namespace HR_ISA

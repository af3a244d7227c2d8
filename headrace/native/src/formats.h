// How the weights of one panel (16 rows) lie in memory, and how a vector of L rows is read.
//
// A panel is one stream of runs: the quants of one or 8 blocks of 32 columns, then their scales.
// Quants of a block are 8 groups of 4 columns; a group is 64 bytes, byte 4 r + j = row r, column 4 g + j, so that L rows
// are one vector of L lanes of 4 bytes. Smaller quants share bytes: in a byte of group g (g < 4) the
// high nibble belongs to group g + 4. A fifth bit of group g is bit g of one more group; fifth and
// sixth bits are bits 2 (g % 4) of group g / 4 of two more.
// Every weight is d * u + m with u >= 0 (or signed for 8 bits) and m stored or -zero * d.
#pragma once
#include "native.h"
#include "simd.h"

namespace HR_ISA {

constexpr int kGroupBytes = 4 * kPanel;

// `q`: the block's quants at the first of the L rows. `s`: the scales of the run; `b` < kRun.
struct Nibbles {
  static constexpr int kQuantBytes = 4 * kGroupBytes;
  static constexpr bool kSigned = false;
  HR_INLINE void unpack(const uint8_t* q, B* w) {
    const B mask = bset1(15);
    for (int g = 0; g < 4; ++g) {
      const B both = load_bytes(q + g * kGroupBytes);
      w[g] = band(both, mask);
      w[g + 4] = band(right<4>(both), mask);
    }
  }
};

struct FiveBits {
  static constexpr int kQuantBytes = 5 * kGroupBytes;
  static constexpr bool kSigned = false;
  HR_INLINE void unpack(const uint8_t* q, B* w) {
    Nibbles::unpack(q, w);
    const B high = load_bytes(q + 4 * kGroupBytes), mask = bset1(16);
    w[0] = bor(w[0], band(left<4>(high), mask));
    w[1] = bor(w[1], band(left<3>(high), mask));
    w[2] = bor(w[2], band(left<2>(high), mask));
    w[3] = bor(w[3], band(left<1>(high), mask));
    w[4] = bor(w[4], band(high, mask));
    w[5] = bor(w[5], band(right<1>(high), mask));
    w[6] = bor(w[6], band(right<2>(high), mask));
    w[7] = bor(w[7], band(right<3>(high), mask));
  }
};

struct SixBits {
  static constexpr int kQuantBytes = 6 * kGroupBytes;
  static constexpr bool kSigned = false;
  HR_INLINE void unpack(const uint8_t* q, B* w) {
    Nibbles::unpack(q, w);
    const B mask = bset1(48);
    for (int i = 0; i < 2; ++i) {
      const B high = load_bytes(q + (4 + i) * kGroupBytes);
      w[4 * i] = bor(w[4 * i], band(left<4>(high), mask));
      w[4 * i + 1] = bor(w[4 * i + 1], band(left<2>(high), mask));
      w[4 * i + 2] = bor(w[4 * i + 2], band(high, mask));
      w[4 * i + 3] = bor(w[4 * i + 3], band(right<2>(high), mask));
    }
  }
};

struct EightBits {
  static constexpr int kQuantBytes = 8 * kGroupBytes;
  static constexpr bool kSigned = true;
  HR_INLINE void unpack(const uint8_t* q, B* w) {
    for (int g = 0; g < 8; ++g) w[g] = load_q8(q + g * kGroupBytes);
  }
};

HR_INLINE const uint16_t* halves(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

// d half [16].
template <int Zero> struct Scaled {
  static constexpr int kParts = 1;  // scales a block of 32
  static constexpr bool kShifted = Zero != 0;
  static constexpr int kRun = 1, kScaleBytes = 2 * kPanel;
  HR_INLINE void read(const uint8_t* s, int, int lane, F* d, F* m) {
    *d = load_f16(halves(s) + lane);
    *m = mul(*d, set1(-static_cast<float>(Zero)));
  }
};

// d half [16], m half [16].
struct Shifted {
  static constexpr int kParts = 1;
  static constexpr bool kShifted = true;
  static constexpr int kRun = 1, kScaleBytes = 4 * kPanel;
  HR_INLINE void read(const uint8_t* s, int, int lane, F* d, F* m) {
    *d = load_f16(halves(s) + lane);
    *m = load_f16(halves(s) + kPanel + lane);
  }
};

// 8 blocks: d half [16], dmin half [16], then scale u8 [16], min u8 [16] a block.
struct SuperShifted {
  static constexpr int kParts = 1;
  static constexpr bool kShifted = true;
  static constexpr int kRun = 8, kScaleBytes = 4 * kPanel + kRun * 2 * kPanel;
  HR_INLINE void read(const uint8_t* s, int b, int lane, F* d, F* m) {
    const uint8_t* own = s + 4 * kPanel + b * 2 * kPanel + lane;
    *d = mul(load_f16(halves(s) + lane), load_u8(own));
    const F low = mul(load_f16(halves(s) + kPanel + lane), load_u8(own + kPanel));
    *m = sub(zero(), low);
  }
};

// 8 blocks: d half [16], then scale i8 [2][16] a block, one for each 16 columns.
struct SuperHalves {
  static constexpr int kParts = 2;
  static constexpr bool kShifted = true;
  static constexpr int kRun = 8, kScaleBytes = 2 * kPanel + kRun * 2 * kPanel;
  HR_INLINE void read(const uint8_t* s, int b, int lane, F* d, F* m) {
    const int8_t* own = reinterpret_cast<const int8_t*>(s) + 2 * kPanel + b * 2 * kPanel;
    const F whole = load_f16(halves(s) + lane);
    for (int i = 0; i < 2; ++i) {
      d[i] = mul(whole, load_i8(own + i * kPanel + lane));
      m[i] = mul(d[i], set1(-32.0f));
    }
  }
};

template <class Quants, class Scales> struct Format : Quants, Scales {
  static constexpr int kRunBytes = Scales::kRun * Quants::kQuantBytes + Scales::kScaleBytes;

  HR_INLINE int64_t panel_bytes(int blocks) {
    return (static_cast<int64_t>(blocks / Scales::kRun) * kRunBytes + 63) / 64 * 64;
  }
  template <class T> HR_INLINE T* quants_of(T* panel, int b) {
    return panel + static_cast<int64_t>(b / Scales::kRun) * kRunBytes +
           b % Scales::kRun * Quants::kQuantBytes;
  }
  template <class T> HR_INLINE T* scales_of(T* panel, int b) {
    return panel + static_cast<int64_t>(b / Scales::kRun) * kRunBytes +
           Scales::kRun * Quants::kQuantBytes;
  }
  HR_INLINE void scales(const uint8_t* panel, int b, int lane, F* d, F* m) {
    Scales::read(scales_of(panel, b), b % Scales::kRun, lane, d, m);
  }
};

using Q4_0 = Format<Nibbles, Scaled<8>>;
using Q4_1 = Format<Nibbles, Shifted>;
using Q5_0 = Format<FiveBits, Scaled<16>>;
using Q5_1 = Format<FiveBits, Shifted>;
using Q8_0 = Format<EightBits, Scaled<kQ8Zero>>;
using Q4_K = Format<Nibbles, SuperShifted>;
using Q5_K = Format<FiveBits, SuperShifted>;
using Q6_K = Format<SixBits, SuperHalves>;

// Plain floats: [columns rounded up to 32][16 rows].
HR_INLINE int64_t plain_bytes(int blocks, int size) {
  return static_cast<int64_t>(blocks) * kBlock * kPanel * size;
}

struct F32Weights {
  static constexpr int kSize = 4;
  HR_INLINE int64_t panel_bytes(int blocks) { return plain_bytes(blocks, kSize); }
  HR_INLINE F read(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
};
struct F16Weights {
  static constexpr int kSize = 2;
  HR_INLINE int64_t panel_bytes(int blocks) { return plain_bytes(blocks, kSize); }
  HR_INLINE F read(const uint8_t* p) { return load_f16(halves(p)); }
};
struct BF16Weights {
  static constexpr int kSize = 2;
  HR_INLINE int64_t panel_bytes(int blocks) { return plain_bytes(blocks, kSize); }
  HR_INLINE F read(const uint8_t* p) { return load_bf16(halves(p)); }
};

}  // namespace HR_ISA

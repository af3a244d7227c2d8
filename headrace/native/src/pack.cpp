// Block layouts: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml.
#include "pack.h"

#include "formats.h"
#include "kernels.h"

namespace HR_ISA {

namespace {

// One block of 32 columns of one row, taken apart: the unsigned quants (signed ones for Q8_0).
struct Block {
  uint8_t q[kBlock];
};

void read_nibbles(const uint8_t* raw, Block* block) {
  for (int i = 0; i < 16; ++i) {
    block->q[i] = raw[i] & 15;
    block->q[i + 16] = raw[i] >> 4;
  }
}

void read_fives(const uint8_t* high, const uint8_t* raw, Block* block) {
  uint32_t bits;
  memcpy(&bits, high, sizeof bits);
  read_nibbles(raw, block);
  for (int i = 0; i < kBlock; ++i) block->q[i] |= (bits >> i & 1) << 4;
}

// Block b of a super-block of 256 columns: nibbles of 64 columns share 32 bytes.
void read_super(const uint8_t* raw, int b, Block* block) {
  const uint8_t* q = raw + b / 2 * 32;
  for (int i = 0; i < kBlock; ++i) block->q[i] = b % 2 ? q[i] >> 4 : q[i] & 15;
}

void read_sixes(const uint8_t* low, const uint8_t* high, int b, Block* block) {
  const uint8_t* q = low + b / 4 * 64 + b % 2 * 32;
  const uint8_t* h = high + b / 4 * 32;
  for (int i = 0; i < kBlock; ++i) {
    const int four = b % 4 < 2 ? q[i] & 15 : q[i] >> 4;
    block->q[i] = static_cast<uint8_t>(four | (h[i] >> (2 * (b % 4)) & 3) << 4);
  }
}

// `out`: the block's quants, at the first byte of the row.
void write_block(const Block& block, int bits, uint8_t* out) {
  for (int g = 0; g < 8; ++g) {
    for (int j = 0; j < 4; ++j) {
      const uint8_t u = block.q[4 * g + j];
      if (bits == 8) {
        out[g * kGroupBytes + j] = u;
        continue;
      }
      out[g % 4 * kGroupBytes + j] |= static_cast<uint8_t>((u & 15) << (g / 4 * 4));
      if (bits == 5) out[4 * kGroupBytes + j] |= static_cast<uint8_t>((u >> 4) << g);
      if (bits == 6) {
        out[(4 + g / 4) * kGroupBytes + j] |= static_cast<uint8_t>((u >> 4) << (g % 4 * 2));
      }
    }
  }
}

void put_half(uint8_t* scales, int slot, int row, const uint8_t* half) {
  memcpy(scales + (slot * kPanel + row) * 2, half, 2);
}

// Scale and min of block b, 6 bits each, from the 12 bytes of a Q4_K or Q5_K super-block.
void read_six_bit_scales(const uint8_t* raw, int b, uint8_t* scale, uint8_t* min) {
  if (b < 4) {
    *scale = raw[b] & 63;
    *min = raw[b + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((raw[b + 4] & 15) | (raw[b - 4] >> 6) << 4);
    *min = static_cast<uint8_t>((raw[b + 4] >> 4) | (raw[b] >> 6) << 4);
  }
}

// Types with blocks of 32: half d (, half m), then (4 bytes of fifth bits,) the quants.
template <class W, int Bits, int Halves>
void pack_small(int columns, const uint8_t* raw, int row, uint8_t* panel) {
  for (int b = 0; b < columns / kBlock; ++b) {
    Block block;
    for (int i = 0; i < Halves; ++i) put_half(W::scales_of(panel, b), i, row, raw + 2 * i);
    raw += 2 * Halves;
    if (Bits == 8) {
      memcpy(block.q, raw, kBlock);
    } else if (Bits == 5) {
      read_fives(raw, raw + 4, &block);
      raw += 4;
    } else {
      read_nibbles(raw, &block);
    }
    raw += Bits == 8 ? 32 : 16;
    write_block(block, Bits, W::quants_of(panel, b) + 4 * row);
  }
}

// Q4_K: d, dmin, 12 bytes of scales, 128 of nibbles. Q5_K: 32 bytes of fifth bits before those.
template <class W, int Bits>
void pack_super_shifted(int columns, const uint8_t* raw, int row, uint8_t* panel) {
  constexpr int kSize = Bits == 5 ? 176 : 144;
  for (int b = 0; b < columns / kBlock; ++b) {
    const uint8_t* super = raw + b / 8 * kSize;
    uint8_t* scales = W::scales_of(panel, b);
    Block block;
    read_super(super + kSize - 128, b % 8, &block);
    for (int i = 0; i < kBlock && Bits == 5; ++i) {
      block.q[i] |= (super[16 + i] >> (b % 8) & 1) << 4;
    }
    write_block(block, Bits, W::quants_of(panel, b) + 4 * row);
    if (b % 8 == 0) {
      put_half(scales, 0, row, super);
      put_half(scales, 1, row, super + 2);
    }
    uint8_t* own = scales + 4 * kPanel + b % 8 * 2 * kPanel + row;
    read_six_bit_scales(super + 4, b % 8, own, own + kPanel);
  }
}

// Q6_K: 128 bytes of low nibbles, 64 of high bits, 16 signed scales, d.
void pack_super_halves(int columns, const uint8_t* raw, int row, uint8_t* panel) {
  for (int b = 0; b < columns / kBlock; ++b) {
    const uint8_t* super = raw + b / 8 * 210;
    uint8_t* scales = Q6_K::scales_of(panel, b);
    Block block;
    read_sixes(super, super + 128, b % 8, &block);
    write_block(block, 6, Q6_K::quants_of(panel, b) + 4 * row);
    if (b % 8 == 0) put_half(scales, 0, row, super + 208);
    for (int i = 0; i < 2; ++i) {
      scales[2 * kPanel + (b % 8 * 2 + i) * kPanel + row] = super[192 + b % 8 * 2 + i];
    }
  }
}

template <int Size> void pack_plain(int columns, const uint8_t* raw, int row, uint8_t* panel) {
  for (int64_t k = 0; k < columns; ++k) {
    memcpy(panel + (k * kPanel + row) * Size, raw + k * Size, Size);
  }
}

struct Layout {
  int block;            // columns that a row must be a multiple of
  int raw_block_bytes;  // of them in a GGUF file
  int64_t (*panel_bytes)(int blocks);
  // `raw`: one row as ggml stores it; `row`: its place in the panel.
  void (*pack)(int columns, const uint8_t* raw, int row, uint8_t* panel);
};

bool layout_of(int type, Layout* out) {
  switch (type) {
    case kF32: *out = {1, 4, F32Weights::panel_bytes, pack_plain<4>}; return true;
    case kF16: *out = {1, 2, F16Weights::panel_bytes, pack_plain<2>}; return true;
    case kBF16: *out = {1, 2, BF16Weights::panel_bytes, pack_plain<2>}; return true;
    case kQ4_0: *out = {32, 18, Q4_0::panel_bytes, pack_small<Q4_0, 4, 1>}; return true;
    case kQ4_1: *out = {32, 20, Q4_1::panel_bytes, pack_small<Q4_1, 4, 2>}; return true;
    case kQ5_0: *out = {32, 22, Q5_0::panel_bytes, pack_small<Q5_0, 5, 1>}; return true;
    case kQ5_1: *out = {32, 24, Q5_1::panel_bytes, pack_small<Q5_1, 5, 2>}; return true;
    case kQ8_0: *out = {32, 34, Q8_0::panel_bytes, pack_small<Q8_0, 8, 1>}; return true;
    case kQ4_K: *out = {256, 144, Q4_K::panel_bytes, pack_super_shifted<Q4_K, 4>}; return true;
    case kQ5_K: *out = {256, 176, Q5_K::panel_bytes, pack_super_shifted<Q5_K, 5>}; return true;
    case kQ6_K: *out = {256, 210, Q6_K::panel_bytes, pack_super_halves}; return true;
    default: return false;
  }
}

}  // namespace

int64_t packed_bytes(int type, int rows, int columns) {
  Layout layout;
  if (!layout_of(type, &layout) || rows < 1 || columns < 1 || columns % layout.block) return -1;
  return ceil_div(rows, kPanel) * layout.panel_bytes(ceil_div(columns, kBlock));
}

void pack_rows(int type, int columns, const uint8_t* raw, int count, const int32_t* targets,
               uint8_t* out) {
  Layout layout{};
  layout_of(type, &layout);
  const int blocks = ceil_div(columns, kBlock), size = layout.raw_block_bytes;
  const int64_t panel_bytes = layout.panel_bytes(blocks);
  const int64_t row_bytes = static_cast<int64_t>(columns / layout.block) * size;
  for (int i = 0; i < count; ++i, raw += row_bytes) {
    layout.pack(columns, raw, targets[i] % kPanel, out + targets[i] / kPanel * panel_bytes);
  }
}

}  // namespace HR_ISA

// Ops over rows: embedding, norm and quantisation of activations, rotary embedding and KV write.
#include "elementwise.h"

#include <math.h>

#include "simd.h"

namespace HR_ISA {

namespace {

struct Rows {
  int first, last;
};

Rows rows_of_piece(const Work& work) {
  const int all = rows_of(*work.op, *work.step), first = work.piece * kRowsAPiece;
  return {first, first + kRowsAPiece < all ? first + kRowsAPiece : all};
}

// The 32 columns from `column` on, with zeros past the end of the row.
HR_INLINE void read_block(const float* x, int column, int width, float* block) {
  const int count = width - column < kBlock ? width - column : kBlock;
  memcpy(block, x + column, count * sizeof(float));
  for (int i = count; i < kBlock; ++i) block[i] = 0.0f;
}

float norm_scale(const float* x, int width, float epsilon) {
  F total = zero();
  int i = 0;
  for (; i + L <= width; i += L) {
    const F v = load(x + i);
    total = fma(v, v, total);
  }
  float squares = sum(total);
  for (; i < width; ++i) squares += x[i] * x[i];
  return 1.0f / sqrtf(squares / static_cast<float>(width) + epsilon);
}

// A NaN or an infinity in the block makes its scale NaN, so that it is not lost in the rounding.
void write_fast(const float* x, FastBlock* out, int row) {
  F high = zero(), check = zero();
  for (int i = 0; i < kBlock; i += L) {
    const F v = load(x + i);
    high = fmax(high, fabs(v));
    check = fma(v, zero(), check);
  }
  const float top = highest(high), scale = top / 127.0f + sum(check);
  const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
  F sums[2] = {zero(), zero()};
  for (int i = 0; i < kBlock; i += L) {
    const I q = nearest(mul(load(x + i), set1(inverse)));
    store_i8(out->q[row] + i, q);
    sums[i / 16] = add(sums[i / 16], to_float(q));
  }
  const float low = sum(sums[0]), rest = sum(sums[1]);
  out->scale[row] = scale;
  out->sum[row] = scale * (low + rest);
  out->half_sum[0][row] = scale * low;
  out->half_sum[1][row] = scale * rest;
}

void write_exact(const float* x, ExactBlock* out, int row) {
  for (int i = 0; i < kBlock; ++i) out->x[i][row] = x[i];
}

// One line of the cache. Returns the scale of an int8 line.
float write_line(const float* x, int width, void* line, int type) {
  if (type == kF32) {
    memcpy(line, x, width * sizeof(float));
    return 1.0f;
  }
  if (type == kQ8_0) {
    float top = 0.0f, check = 0.0f;
    for (int i = 0; i < width; ++i) {
      const float magnitude = fabsf(x[i]);
      top = magnitude > top ? magnitude : top;
      check += x[i] * 0.0f;
    }
    const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    int8_t* out = static_cast<int8_t*>(line);
    for (int i = 0; i < width; ++i) out[i] = static_cast<int8_t>(lrintf(x[i] * inverse));
    return top / 127.0f + check;
  }
  uint16_t* out = static_cast<uint16_t*>(line);
  int i = 0;
  for (; i + L <= width; i += L) {
    type == kF16 ? store_f16(out + i, load(x + i)) : store_bf16(out + i, load(x + i));
  }
  for (; i < width; ++i) out[i] = type == kF16 ? float_to_half(x[i]) : float_to_bfloat(x[i]);
  return 1.0f;
}

// Pairs (x[i], x[i + d/2]) turned by the angle, times `scale`.
void turn(float* x, int half, const float* cosines, const float* sines, float scale) {
  int i = 0;
  for (; i + L <= half; i += L) {
    const F a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
    store(x + i, mul(sub(mul(a, c), mul(b, s)), set1(scale)));
    store(x + half + i, mul(fma(b, c, mul(a, s)), set1(scale)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i], c = cosines[i], s = sines[i];
    x[i] = (a * c - b * s) * scale;
    x[half + i] = (b * c + a * s) * scale;
  }
}

}  // namespace

void quantise(const Work& work) {
  const Op& op = *work.op;
  const int width = op.width, blocks = ceil_div(width, kBlock);
  const Rows rows = rows_of_piece(work);
  for (int row = rows.first; row < rows.last; ++row) {
    const int source = op.flags & kOfHead ? work.step->head_rows[row] : row;
    const float* x = op.x + static_cast<int64_t>(source) * width;
    const float scale = op.weight ? norm_scale(x, width, op.epsilon) : 1.0f;
    const int64_t tile = row / kTile;
    for (int b = 0; b < blocks; ++b) {
      alignas(64) float block[kBlock], weight[kBlock];
      read_block(x, b * kBlock, width, block);
      if (op.weight) {
        read_block(op.weight, b * kBlock, width, weight);
        for (int i = 0; i < kBlock; i += L) {
          store(block + i, mul(mul(load(block + i), set1(scale)), load(weight + i)));
        }
      }
      if (op.flags & kExact) {
        write_exact(block, static_cast<ExactBlock*>(op.acts) + tile * blocks + b, row % kTile);
      } else {
        write_fast(block, static_cast<FastBlock*>(op.acts) + tile * blocks + b, row % kTile);
      }
    }
  }
}

void rotate(const Work& work) {
  const Op& op = *work.op;
  const Step& step = *work.step;
  const int width = step.head_dim, half = width / 2;
  const int element = step.kv_type == kF32 ? 4 : step.kv_type == kQ8_0 ? 1 : 2;
  const float scale = 1.0f / sqrtf(static_cast<float>(width));
  const Rows rows = rows_of_piece(work);
  for (int t = rows.first; t < rows.last; ++t) {
    const int position = step.positions[t];
    const float* cosines = step.cosines + static_cast<int64_t>(position) * half;
    const float* sines = step.sines + static_cast<int64_t>(position) * half;
    float* q = op.out + static_cast<int64_t>(t) * (step.heads + 2 * step.kv_heads) * width;
    for (int h = 0; h < step.heads; ++h) turn(q + h * width, half, cosines, sines, scale);
    if (!step.writes[t]) continue;
    float* k = q + step.heads * width;
    const float* v = k + step.kv_heads * width;
    const int64_t* table = step.tables + static_cast<int64_t>(step.rows[t]) * step.table_width;
    const int64_t block = table[position / step.block_size];
    for (int h = 0; h < step.kv_heads; ++h, k += width, v += width) {
      turn(k, half, cosines, sines, 1.0f);
      const int64_t line =
          (block * step.kv_heads + h) * step.block_size + position % step.block_size;
      const int64_t offset = line * width * element;
      const float k_scale = write_line(k, width, static_cast<char*>(op.k) + offset, step.kv_type);
      const float v_scale = write_line(v, width, static_cast<char*>(op.v) + offset, step.kv_type);
      if (step.kv_type == kQ8_0) {
        op.k_scales[line] = k_scale;
        op.v_scales[line] = v_scale;
      }
    }
  }
}

}  // namespace HR_ISA

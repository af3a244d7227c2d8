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

constexpr int kVectors = kBlock / L;

// The 32 columns from `column` on, with zeros past the end of the row.
HR_INLINE void read_block(const float* x, int column, int width, F* block) {
  if (column + kBlock <= width) {
    for (int i = 0; i < kVectors; ++i) block[i] = load(x + column + i * L);
    return;
  }
  float some[kBlock] = {};
  memcpy(some, x + column, (width - column) * sizeof(float));
  for (int i = 0; i < kVectors; ++i) block[i] = load(some + i * L);
}

// Sums of 8 signed bytes, by adding pairs of their unsigned neighbours in one register.
HR_INLINE int sum_of_8(const int8_t* q) {
  uint64_t bytes;
  memcpy(&bytes, q, sizeof bytes);
  bytes ^= 0x8080808080808080u;  // q + 128
  const uint64_t even = 0x00ff00ff00ff00ffu;
  const uint64_t pairs = (bytes & even) + (bytes >> 8 & even);
  return static_cast<int>(pairs * 0x0001000100010001u >> 48) - 8 * 128;
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

// A NaN or an infinity in the block makes its scale one, so that it is not lost in the rounding.
HR_INLINE void write_fast(const F* x, FastBlock* out, int row) {
  F high = zero();
  for (int i = 0; i < kVectors; ++i) high = magnitude_max(high, x[i]);
  const float top = highest_magnitude(high), scale = top * (1.0f / 127.0f);
  const F inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
  int8_t* q = out->q[row];
  for (int i = 0; i < kVectors; ++i) store_i8(q + i * L, nearest(mul(x[i], inverse)));
  const int low = sum_of_8(q) + sum_of_8(q + 8), rest = sum_of_8(q + 16) + sum_of_8(q + 24);
  out->scale[row] = scale;
  out->sum[row] = scale * static_cast<float>(low + rest);
  out->half_sum[0][row] = scale * static_cast<float>(low);
  out->half_sum[1][row] = scale * static_cast<float>(rest);
}

HR_INLINE void write_exact(const F* x, ExactBlock* out, int row) {
  float some[kBlock];
  for (int i = 0; i < kVectors; ++i) store(some + i * L, x[i]);
  for (int i = 0; i < kBlock; ++i) out->x[i][row] = some[i];
}

// x = scale * q. A NaN or an infinity makes the scale one, so that it is not lost in the rounding.
float write_eight(const float* x, int width, int8_t* out) {
  F high = zero();
  int i = 0;
  for (; i + L <= width; i += L) high = magnitude_max(high, load(x + i));
  float rest[L] = {};
  memcpy(rest, x + i, (width - i) * sizeof(float));
  const float top = highest_magnitude(magnitude_max(high, load(rest)));
  const F inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
  for (i = 0; i + L <= width; i += L) store_i8(out + i, nearest(mul(load(x + i), inverse)));
  int8_t last[L];
  store_i8(last, nearest(mul(load(rest), inverse)));
  memcpy(out + i, last, width - i);
  return top * (1.0f / 127.0f);
}

// One line of the cache. Returns the scale of an int8 line.
float write_line(const float* x, int width, void* line, int type) {
  if (type == kF32) {
    memcpy(line, x, width * sizeof(float));
    return 1.0f;
  }
  if (type == kQ8_0) return write_eight(x, width, static_cast<int8_t*>(line));
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

// x * scale(x) * weight, in place.
void norm_head(float* x, const float* weight, int width, float epsilon) {
  const float scale = norm_scale(x, width, epsilon);
  int i = 0;
  for (; i + L <= width; i += L) {
    store(x + i, mul(mul(load(x + i), set1(scale)), load(weight + i)));
  }
  for (; i < width; ++i) x[i] = x[i] * scale * weight[i];
}

}  // namespace

void quantise(const Work& work) {
  const Op& op = *work.op;
  const int width = op.width, blocks = ceil_div(width, kBlock);
  const Rows rows = rows_of_piece(work);
  const float* x[kRowsAPiece];
  float scale[kRowsAPiece];
  for (int i = 0; i < rows.last - rows.first; ++i) {
    x[i] = op.x + static_cast<int64_t>(rows.first + i) * width;
    scale[i] = op.weight ? norm_scale(x[i], width, op.epsilon) : 1.0f;
  }
  // Block by block: the rows of a block share lines with those that another thread writes.
  for (int b = 0; b < blocks; ++b) {
    F weight[kVectors];
    if (op.weight) read_block(op.weight, b * kBlock, width, weight);
    for (int row = rows.first; row < rows.last; ++row) {
      F block[kVectors];
      read_block(x[row - rows.first], b * kBlock, width, block);
      for (int i = 0; i < kVectors && op.weight; ++i) {
        block[i] = mul(mul(block[i], set1(scale[row - rows.first])), weight[i]);
      }
      const int64_t at = static_cast<int64_t>(row / kTile) * blocks + b;
      if (op.flags & kExact) {
        write_exact(block, static_cast<ExactBlock*>(op.acts) + at, row % kTile);
      } else {
        write_fast(block, static_cast<FastBlock*>(op.acts) + at, row % kTile);
      }
    }
  }
}

void rotate(const Work& work) {
  const Op& op = *work.op;
  const Step& step = *work.step;
  const int width = step.head_dim, half = width / 2;
  const int element = step.kv_type == kF32 ? 4 : step.kv_type == kQ8_0 ? 1 : 2;
  const Rows rows = rows_of_piece(work);
  for (int t = rows.first; t < rows.last; ++t) {
    const int position = step.positions[t];
    const float* cosines = op.cosines + static_cast<int64_t>(position) * half;
    const float* sines = op.sines + static_cast<int64_t>(position) * half;
    float* q = op.out + static_cast<int64_t>(t) * (step.heads + 2 * step.kv_heads) * width;
    for (int h = 0; h < step.heads; ++h) {
      if (op.weight) norm_head(q + h * width, op.weight, width, op.epsilon);
      turn(q + h * width, half, cosines, sines, op.scale);
    }
    if (!step.writes[t]) continue;
    float* k = q + step.heads * width;
    const float* v = k + step.kv_heads * width;
    const int64_t block = table_of(op, step, t)[position / step.block_size];
    for (int h = 0; h < step.kv_heads; ++h, k += width, v += width) {
      if (op.k_norm) norm_head(k, op.k_norm, width, op.epsilon);
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

void gather(const Work& work) {
  const Op& op = *work.op;
  const Rows rows = rows_of_piece(work);
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const int64_t source = work.step->head_rows[row];
    memcpy(op.out + row * op.width, op.x + source * op.width, op.width * sizeof(float));
  }
}

void add_normed(const Work& work) {
  const Op& op = *work.op;
  const Rows rows = rows_of_piece(work);
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const float* x = op.x + row * op.width;
    float* out = op.out + row * op.width;
    const float scale = norm_scale(x, op.width, op.epsilon);
    int i = 0;
    for (; i + L <= op.width; i += L) {
      const F normed = mul(load(x + i), set1(scale));
      store(out + i, fma(normed, load(op.weight + i), load(out + i)));
    }
    for (; i < op.width; ++i) out[i] += x[i] * scale * op.weight[i];
  }
}

void peaks(const Work& work) {
  const Op& op = *work.op;
  const int width = op.width, whole = width / L * L;
  const float* x = op.x + static_cast<int64_t>(work.piece) * op.stride;
  F high = set1(x[0]), magnitude = zero();
  for (int i = 0; i < whole; i += L) {
    const F v = load(x + i);
    high = fmax(v, high);
    magnitude = magnitude_max(magnitude, v);
  }
  float top = highest(high), largest = highest_magnitude(magnitude);
  for (int i = whole; i < width; ++i) {
    top = x[i] > top ? x[i] : top;
    const float size = fabsf(x[i]);
    if (size > largest || size != size) largest = size;
  }
  const bool finite = largest <= 3.4028234663852886e38f;
  int first = 0;
  // Every vector before the one that holds the top has a lower highest.
  while (finite && first < whole && highest(load(x + first)) < top) first += L;
  while (finite && x[first] < top) ++first;
  op.best[work.piece] = first;
  op.finite[work.piece] = finite;
}

}  // namespace HR_ISA

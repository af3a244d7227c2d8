// Products of a panel of weights with a tile of activations, in every format.
//
// fast: the int8 products of a block are exact in int32; scale of the weights x scale of the
// activations turns them to float. exact: weights are made float in registers.
#include "linear.h"

#include <math.h>

#include "formats.h"

namespace HR_ISA {

namespace {

constexpr int kAheadBytes = 4096;

// With few rows a panel is bound by memory: ask for the lines of a later block or panel.
template <int Bytes> HR_INLINE void fetch_ahead(const uint8_t* quants) {
#pragma GCC unroll 8
  for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(quants + kAheadBytes + i);
}

// M rows of one tile x one panel, whose weights stay in registers.
template <class W, int M>
void fast_tile(const uint8_t* panel, int blocks, const void* acts, int row, float* out) {
  const FastBlock* tile = static_cast<const FastBlock*>(acts);
  // Rows side by side: their chains of products overlap. One or two rows: two chains each.
  constexpr int kSide = M < 4 ? M : 4, kChains = W::kParts == 2 || M <= 2 ? 2 : 1;
  for (int lane = 0; lane < kPanel; lane += L) {
    F total[M];
    for (int r = 0; r < M; ++r) total[r] = zero();
    for (int b = 0; b < blocks; ++b) {
      const uint8_t* quants = W::quants_of(panel, b) + 4 * lane;
      if (M <= 8) fetch_ahead<W::kRunBytes / W::kRun>(quants);
      // One base for each kind of datum: rows and groups are constant distances from it.
      const int8_t* q = opaque(tile[b].q[row]);
      const float* scale = opaque(tile[b].scale + row);
      B w[8];
      F d[W::kParts], m[W::kParts];
      W::unpack(quants, w);
      W::scales(panel, b, lane, d, m);
#pragma GCC unroll 16
      for (int first = 0; first < M; first += kSide) {
        I sums[kSide][kChains];
#pragma GCC unroll 8
        for (int i = 0; i < kSide * kChains; ++i) sums[i / kChains][i % kChains] = izero();
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
#pragma GCC unroll 4
          for (int r = 0; r < kSide; ++r) {
            I& sum = sums[r][kChains == 2 ? g / 4 : 0];
            const int8_t* four = q + (first + r) * kBlock + 4 * g;
            sum = W::kSigned ? dot4_q8(sum, w[g], four) : dot4(sum, w[g], four);
          }
        }
#pragma GCC unroll 4
        for (int i = 0; i < kSide; ++i) {
          const int r = first + i;
          const F own = set1(scale[r]);
          if (W::kParts == 2) {
            for (int p = 0; p < W::kParts; ++p) {
              total[r] = fma(to_float(sums[i][p]), mul(d[p], own), total[r]);
              total[r] = fma(m[p], set1(scale[(2 + p) * kTile + r]), total[r]);
            }
          } else {
            const I whole = kChains == 2 ? iadd(sums[i][0], sums[i][1]) : sums[i][0];
            total[r] = fma(to_float(whole), mul(d[0], own), total[r]);
            if (W::kShifted) total[r] = fma(m[0], set1(scale[kTile + r]), total[r]);
          }
        }
      }
    }
    for (int r = 0; r < M; ++r) store(out + r * kPanel + lane, total[r]);
  }
}

constexpr int kRowsAtOnce = 64;  // the totals of two panels stay in the first-level cache

// One block of U vectors of weight rows.
template <class W, int U> struct Unpacked {
  B w[U][8];
  F d[U][W::kParts], m[U][W::kParts];
};

// Distance of vector u of the totals of adjacent panels, [panel][kRowsAtOnce][kPanel].
constexpr int unit_offset(int u) {
  return u * L / kPanel * kRowsAtOnce * kPanel + u * L % kPanel;
}

// totals += the block x R rows of activations. The float operations of one total, and their order,
// are those of fast_tile: a row's result does not depend on the rows beside it.
template <class W, int U, int R>
HR_INLINE void fold(const Unpacked<W, U>& unpacked, const FastBlock& acts, int row, float* totals) {
  // Weights stay in memory: else the compiler keeps them in the registers that sums need.
  const Unpacked<W, U>* hidden = &unpacked;
  asm volatile("" : "+r"(hidden) : : "memory");
  const Unpacked<W, U>& weights = *hidden;
  const int8_t* q = opaque(acts.q[row]);
  const float* scale = opaque(acts.scale + row);
  I sums[R][U][W::kParts];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < U * W::kParts; ++i) sums[r][i / W::kParts][i % W::kParts] = izero();
  }
  // Neighbours in this order are independent: R x U chains run side by side.
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    B w[U];
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) w[u] = weights.w[u][g];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const B four = four_times(q + r * kBlock + 4 * g);
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
        I& sum = sums[r][u][W::kParts == 2 ? g / 4 : 0];
        sum = W::kSigned ? dot_q8(sum, w[u], four) : dot(sum, w[u], four);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const F own = set1(scale[r]);
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      float* place = totals + r * kPanel + unit_offset(u);
      F total = load(place);
#pragma GCC unroll 2
      for (int i = 0; i < W::kParts; ++i) {
        total = fma(to_float(sums[r][u][i]), mul(weights.d[u][i], own), total);
        const float* sum = scale + (W::kParts == 2 ? 2 + i : 1) * kTile + r;
        if (W::kShifted) total = fma(weights.m[u][i], set1(*sum), total);
      }
      store(place, total);
    }
  }
}

// Rows [row, ...) of a tile: returns how many the call covered, idle ones after the last included.
template <class W, int U>
HR_INLINE int fold_some(const Unpacked<W, U>& weights, const FastBlock& acts, int row, int left,
                        float* totals) {
  if (kRowsAside == 8 && left >= 6) return fold<W, U, kRowsAside>(weights, acts, row, totals), 8;
  return fold<W, U, 4>(weights, acts, row, totals), 4;
}

// totals [panel][kRowsAtOnce][kPanel] of U vectors of weight rows, from vector `unit` on of the
// panels, x rows <= kRowsAtOnce activations.
template <class W, int U>
void fast_units(const uint8_t* const* panels, int unit, int blocks, const FastBlock* acts, int rows,
                float* totals) {
  for (int b = 0; b < blocks; ++b) {
    Unpacked<W, U> weights;
    for (int u = 0; u < U; ++u) {
      const uint8_t* panel = panels[(unit + u) * L / kPanel];
      const int lane = (unit + u) * L % kPanel;
      const uint8_t* quants = W::quants_of(panel, b) + 4 * lane;
      W::unpack(quants, weights.w[u]);
      W::scales(panel, b, lane, weights.d[u], weights.m[u]);
    }
    for (int first = 0; first < rows; first += kTile) {
      const FastBlock& tile = acts[first / kTile * blocks + b];
      const int count = rows - first < kTile ? rows - first : kTile;
      for (int row = 0; row < count;) {
        row += fold_some<W, U>(weights, tile, row, count - row,
                               totals + (first + row) * kPanel + unit_offset(unit));
      }
    }
  }
}

// out [panel][kRowsAtOnce][kPanel] of one or two panels.
template <class W>
void fast_many(const uint8_t* const* panels, int count, int blocks, const void* acts, int rows,
               float* out) {
  const FastBlock* tiles = static_cast<const FastBlock*>(acts);
  constexpr int kUnits = kPanel / L;  // of one panel
  for (int i = 0; i < count; ++i) {
    memset(out + i * kRowsAtOnce * kPanel, 0, sizeof(float) * round_up(rows, 8) * kPanel);
  }
  int unit = 0;
  for (; unit + 2 <= count * kUnits; unit += 2) {
    fast_units<W, 2>(panels, unit, blocks, tiles, rows, out);
  }
  if (unit < count * kUnits) fast_units<W, 1>(panels, unit, blocks, tiles, rows, out);
}

// Column J of a group.
template <class W, int J> HR_INLINE F weight_of(B group, F d, F m) {
  return fma(W::kSigned ? q8_to_float<J>(group) : byte_to_float<J>(group), d, m);
}

template <class W, int J, int M>
HR_INLINE void exact_column(B group, F d, F m, const float* x, F* total) {
  const F w = weight_of<W, J>(group, d, m);
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) total[r] = fma(w, set1(x[J * kTile + r]), total[r]);
}

template <class W, int M>
void exact_tile(const uint8_t* panel, int blocks, const void* acts, int row, float* out) {
  const ExactBlock* tile = static_cast<const ExactBlock*>(acts);
  for (int lane = 0; lane < kPanel; lane += L) {
    F total[M];
    for (int r = 0; r < M; ++r) total[r] = zero();
    for (int b = 0; b < blocks; ++b) {
      B w[8];
      F d[W::kParts], m[W::kParts];
      W::unpack(W::quants_of(panel, b) + 4 * lane, w);
      W::scales(panel, b, lane, d, m);
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) {
        const float* x = opaque(tile[b].x[4 * g] + row);
        const int i = W::kParts == 2 ? g / 4 : 0;
        exact_column<W, 0, M>(w[g], d[i], m[i], x, total);
        exact_column<W, 1, M>(w[g], d[i], m[i], x, total);
        exact_column<W, 2, M>(w[g], d[i], m[i], x, total);
        exact_column<W, 3, M>(w[g], d[i], m[i], x, total);
      }
    }
    for (int r = 0; r < M; ++r) store(out + r * kPanel + lane, total[r]);
  }
}

template <class W, int M>
void float_tile(const uint8_t* panel, int blocks, const void* acts, int row, float* out) {
  const float* x = static_cast<const ExactBlock*>(acts)[0].x[0] + row;
  for (int lane = 0; lane < kPanel; lane += L) {
    F total[M];
    for (int r = 0; r < M; ++r) total[r] = zero();
#pragma GCC unroll 4
    for (int64_t k = 0; k < static_cast<int64_t>(blocks) * kBlock; ++k) {
      const F w = W::read(panel + (k * kPanel + lane) * W::kSize);
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r) total[r] = fma(w, set1(x[k * kTile + r]), total[r]);
    }
    for (int r = 0; r < M; ++r) store(out + r * kPanel + lane, total[r]);
  }
}

// Row `row` of a panel as floats [columns].
template <class W> void quantised_row(const uint8_t* panel, int columns, int row, float* out) {
  const int blocks = ceil_div(columns, kBlock), lane = row / L * L;
  for (int b = 0; b < blocks; ++b) {
    B w[8];
    F d[W::kParts], m[W::kParts];
    W::unpack(W::quants_of(panel, b) + 4 * lane, w);
    W::scales(panel, b, lane, d, m);
    for (int g = 0; g < 8; ++g) {
      const int i = W::kParts == 2 ? g / 4 : 0;
      float lanes[4][L];
      store(lanes[0], weight_of<W, 0>(w[g], d[i], m[i]));
      store(lanes[1], weight_of<W, 1>(w[g], d[i], m[i]));
      store(lanes[2], weight_of<W, 2>(w[g], d[i], m[i]));
      store(lanes[3], weight_of<W, 3>(w[g], d[i], m[i]));
      for (int j = 0; j < 4; ++j) out[b * kBlock + 4 * g + j] = lanes[j][row - lane];
    }
  }
}

template <class W> void plain_row(const uint8_t* panel, int columns, int row, float* out) {
  const int lane = row / L * L;
  for (int64_t k = 0; k < columns; ++k) {
    float lanes[L];
    store(lanes, W::read(panel + (k * kPanel + lane) * W::kSize));
    out[k] = lanes[row - lane];
  }
}

using ManyFn = void (*)(const uint8_t* const* panels, int count, int blocks, const void* acts,
                        int rows, float* out);
using TileFn = void (*)(const uint8_t* panel, int blocks, const void* acts, int row, float* out);

struct Tiles {
  ManyFn many;  // null for plain floats
  TileFn fast[5];  // by log2 of the rows
  TileFn exact[5];
  void (*row)(const uint8_t* panel, int columns, int row, float* out);
  int64_t (*panel_bytes)(int blocks);
};

// Rows that this instruction set has registers for; more go in several calls.
template <int M> constexpr int fit = M < kMaxRows ? M : kMaxRows;

template <class W> constexpr Tiles quantised() {
  return {fast_many<W>,
          {fast_tile<W, fit<1>>, fast_tile<W, fit<2>>, fast_tile<W, fit<4>>, fast_tile<W, fit<8>>,
           fast_tile<W, fit<16>>},
          {exact_tile<W, fit<1>>, exact_tile<W, fit<2>>, exact_tile<W, fit<4>>,
           exact_tile<W, fit<8>>, exact_tile<W, fit<16>>},
          quantised_row<W>,
          W::panel_bytes};
}

template <class W> constexpr Tiles plain() {
  return {nullptr,
          {},
          {float_tile<W, fit<1>>, float_tile<W, fit<2>>, float_tile<W, fit<4>>,
           float_tile<W, fit<8>>, float_tile<W, fit<16>>},
          plain_row<W>,
          W::panel_bytes};
}

constexpr Tiles kTiles[] = {
    quantised<Q4_0>(), quantised<Q4_1>(), quantised<Q5_0>(),    quantised<Q5_1>(),
    quantised<Q8_0>(), quantised<Q4_K>(), quantised<Q5_K>(),    quantised<Q6_K>(),
    plain<F32Weights>(), plain<F16Weights>(), plain<BF16Weights>(),
};

const Tiles& tiles_of(int type) {
  switch (type) {
    case kQ4_0: return kTiles[0];
    case kQ4_1: return kTiles[1];
    case kQ5_0: return kTiles[2];
    case kQ5_1: return kTiles[3];
    case kQ8_0: return kTiles[4];
    case kQ4_K: return kTiles[5];
    case kQ5_K: return kTiles[6];
    case kQ6_K: return kTiles[7];
    case kF32: return kTiles[8];
    case kF16: return kTiles[9];
    default: return kTiles[10];
  }
}

// Where a panel, counted over all parts of a linear, lies.
struct Place {
  const Matrix* matrix;
  int panel;   // in the matrix
  int column;  // of the output
};

Place place_of(const Op& op, int panel) {
  int column = 0, part = 0;
  for (; panel >= ceil_div(op.parts[part]->rows, kPanel); ++part) {
    panel -= ceil_div(op.parts[part]->rows, kPanel);
    column += op.parts[part]->rows;
  }
  return {op.parts[part], panel, column + panel * kPanel};
}

const uint8_t* panel_at(const Place& at) {
  return at.matrix->data + at.panel * panel_bytes(at.matrix->type, at.matrix->columns);
}

// out [kRowsAtOnce][kPanel] = rows <= kRowsAtOnce activations x one panel.
void by_tiles(const Place& at, const void* acts, bool exact, int rows, float* out) {
  const int blocks = ceil_div(at.matrix->columns, kBlock);
  const int64_t block_bytes = exact ? sizeof(ExactBlock) : sizeof(FastBlock);
  const uint8_t* weights = panel_at(at);
  const Tiles& tiles = tiles_of(at.matrix->type);
  const TileFn* by_rows = exact ? tiles.exact : tiles.fast;
  for (int row = 0; row < rows;) {
    const int end = row / kTile * kTile + kTile, left = (rows < end ? rows : end) - row;
    int log = 0;
    while ((2 << log) <= left && (2 << log) <= kMaxRows) ++log;
    // A larger kernel with idle rows beats two smaller ones if it wastes at most a quarter.
    if ((1 << log) < left && (2 << log) <= kMaxRows && left * 4 >= (2 << log) * 3) ++log;
    const char* tile = static_cast<const char*>(acts) + row / kTile * blocks * block_bytes;
    by_rows[log](weights, blocks, tile, row % kTile, out + row * kPanel);
    row += 1 << log;
  }
}

// out [count][kRowsAtOnce][kPanel] = rows <= kRowsAtOnce activations x one or two panels.
void product(const Place* at, int count, const void* acts, bool exact, int rows, float* out) {
  if (exact || rows <= kTile) {
    for (int i = 0; i < count; ++i, out += kRowsAtOnce * kPanel) {
      by_tiles(at[i], acts, exact, rows, out);
    }
    return;
  }
  const uint8_t* panels[2] = {panel_at(at[0]), count == 2 ? panel_at(at[1]) : nullptr};
  const int blocks = ceil_div(at[0].matrix->columns, kBlock);
  const bool alike = count == 2 && at[1].matrix->type == at[0].matrix->type;
  const Tiles& tiles = tiles_of(at[0].matrix->type);
  tiles.many(panels, alike ? 2 : 1, blocks, acts, rows, out);
  if (count == 2 && !alike) {
    const Tiles& own = tiles_of(at[1].matrix->type);
    own.many(panels + 1, 1, blocks, acts, rows, out + kRowsAtOnce * kPanel);
  }
}

HR_INLINE F silu(F x) { return div(x, add(set1(1.0f), exponential(sub(zero(), x)))); }

HR_INLINE F gelu(F x) {
  const F cubic = fma(mul(x, x), mul(x, set1(0.044715f)), x);
  return div(x, add(set1(1.0f), exponential(mul(cubic, set1(-1.5957691216057308f)))));
}

void write_linear(const Op& op, const float* tile, int rows, int columns, float* out, int column) {
  const float* bias = op.bias ? op.bias + column : nullptr;
  for (int r = 0; r < rows; ++r, out += op.width, tile += kPanel) {
    if (columns == kPanel) {
      for (int lane = 0; lane < kPanel; lane += L) {
        F y = load(tile + lane);
        if (bias) y = add(y, load(bias + lane));
        if (op.flags & kAdd) y = add(y, load(out + lane));
        if (op.softcap != 0.0f) y = capped(y, op.softcap);
        store(out + lane, y);
      }
    } else {
      for (int c = 0; c < columns; ++c) {
        float y = tile[c] + (bias ? bias[c] : 0.0f);
        y = op.flags & kAdd ? out[c] + y : y;
        out[c] = op.softcap != 0.0f ? op.softcap * tanhf(y / op.softcap) : y;
      }
    }
  }
}

// `column` of the first of the columns; tiles of gate and up.
template <class Act>
void write_gated(const Op& op, const float* gate, const float* up, int rows, int columns,
                 float* out, int column, Act act) {
  float biases[2][kPanel] = {};
  for (int i = 0; i < 2 && op.bias; ++i) {
    memcpy(biases[i], op.bias + i * op.width + column, columns * sizeof(float));
  }
  for (int r = 0; r < rows; ++r, out += op.width, gate += kPanel, up += kPanel) {
    float y[kPanel];
    for (int lane = 0; lane < kPanel; lane += L) {
      const F x = add(load(gate + lane), load(biases[0] + lane));
      store(y + lane, mul(act(x), add(load(up + lane), load(biases[1] + lane))));
    }
    memcpy(out, y, columns * sizeof(float));
  }
}

}  // namespace

int64_t panel_bytes(int type, int columns) {
  return tiles_of(type).panel_bytes(ceil_div(columns, kBlock));
}

void embed(const Work& work) {
  const Matrix& matrix = *work.op->parts[0];
  const Tiles& tiles = tiles_of(matrix.type);
  const int64_t bytes = panel_bytes(matrix.type, matrix.columns);
  const int first = work.piece * kRowsAPiece;
  for (int t = first; t < first + kRowsAPiece && t < work.step->tokens; ++t) {
    const int id = work.step->ids[t];
    float* out = work.op->out + static_cast<int64_t>(t) * matrix.columns;
    tiles.row(matrix.data + id / kPanel * bytes, matrix.columns, id % kPanel, out);
    for (int i = 0; i < matrix.columns; ++i) out[i] *= work.op->scale;
  }
}

void linear(const Work& work) {
  const Op& op = *work.op;
  const bool exact = op.flags & kExact, gated = op.kind == kGated;
  const int rows = rows_of(op, *work.step), panels = panels_of(op);
  const int group = panels_a_piece(op, work.threads), groups = ceil_div(panels, group);
  const int first_row = work.piece / groups * kRowsAPass, first = work.piece % groups * group;
  const int last_row = rows < first_row + kRowsAPass ? rows : first_row + kRowsAPass;
  const int last = first + group < panels ? first + group : panels;
  const int blocks = ceil_div(op.parts[0]->columns, kBlock);
  const int64_t block_bytes = exact ? sizeof(ExactBlock) : sizeof(FastBlock);
  alignas(64) float tile[2 * kRowsAtOnce * kPanel];
  for (int panel = first; panel < last; panel += gated ? 1 : 2) {
    // Two panels at a time: of gate and up, or neighbours.
    Place at[2] = {place_of(op, panel), {}};
    const int count = gated || panel + 1 < last ? 2 : 1;
    if (count == 2) at[1] = gated ? Place{op.parts[1], panel, 0} : place_of(op, panel + 1);
    for (int row = first_row; row < last_row; row += kRowsAtOnce) {
      const int many = last_row - row < kRowsAtOnce ? last_row - row : kRowsAtOnce;
      const char* acts = static_cast<const char*>(op.acts) + row / kTile * blocks * block_bytes;
      float* out = op.out + static_cast<int64_t>(row) * op.width;
      product(at, count, acts, exact, many, tile);
      for (int i = 0; i < (gated ? 1 : count); ++i) {
        const int left = at[i].matrix->rows - at[i].panel * kPanel;
        const int columns = left < kPanel ? left : kPanel;
        const float* own = tile + i * kRowsAtOnce * kPanel;
        if (gated) {
          const float* up = own + kRowsAtOnce * kPanel;
          float* to = out + at[i].column;
          const int column = at[i].column;
          if (op.flags & kGelu) {
            write_gated(op, own, up, many, columns, to, column, [](F x) { return gelu(x); });
          } else {
            write_gated(op, own, up, many, columns, to, column, [](F x) { return silu(x); });
          }
        } else {
          write_linear(op, own, many, columns, out + at[i].column, at[i].column);
        }
      }
    }
  }
}

}  // namespace HR_ISA

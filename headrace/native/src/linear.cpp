// Products of a panel of weights with a tile of activations, in every format.
//
// fast: the int8 products of a block are exact in int32; scale of the weights x scale of the
// activations turns them to float. exact: weights are made float in registers.
#include "linear.h"

#include "formats.h"

namespace HR_ISA {

namespace {

constexpr int kAheadBytes = 4096;

// With few rows a panel is bound by memory: ask for the lines of a later block or panel.
template <int Bytes> HR_INLINE void fetch_ahead(const uint8_t* quants) {
#pragma GCC unroll 8
  for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(quants + kAheadBytes + i);
}

template <class W, int M>
void fast_tile(const uint8_t* panel, int blocks, const void* acts, int row, float* out) {
  const FastBlock* tile = static_cast<const FastBlock*>(acts);
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
      for (int r = 0; r < M; ++r) {
        I half[2] = {izero(), izero()};
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
          // Two chains where there are too few rows to fill the latency of one.
          I& acc = half[W::kParts == 2 || M <= 2 ? g / 4 : 0];
          const int8_t* four = q + r * kBlock + 4 * g;
          acc = W::kSigned ? dot4_q8(acc, w[g], four) : dot4(acc, w[g], four);
        }
        const F own = set1(scale[r]);
        if (W::kParts == 2) {
          for (int i = 0; i < W::kParts; ++i) {
            total[r] = fma(to_float(half[i]), mul(d[i], own), total[r]);
            total[r] = fma(m[i], set1(scale[(2 + i) * kTile + r]), total[r]);
          }
        } else {
          const I whole = M <= 2 ? iadd(half[0], half[1]) : half[0];
          total[r] = fma(to_float(whole), mul(d[0], own), total[r]);
          if (W::kShifted) total[r] = fma(m[0], set1(scale[kTile + r]), total[r]);
        }
      }
    }
    for (int r = 0; r < M; ++r) store(out + r * kPanel + lane, total[r]);
  }
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

using TileFn = void (*)(const uint8_t*, int, const void*, int, float*);

// By log2 of the rows.
struct Tiles {
  TileFn fast[5];
  TileFn exact[5];
  void (*row)(const uint8_t* panel, int columns, int row, float* out);
  int64_t (*panel_bytes)(int blocks);
};

// Rows that this instruction set has registers for; more go in several calls.
template <int M> constexpr int fit = M < kMaxRows ? M : kMaxRows;

template <class W> constexpr Tiles quantised() {
  return {{fast_tile<W, fit<1>>, fast_tile<W, fit<2>>, fast_tile<W, fit<4>>, fast_tile<W, fit<8>>,
           fast_tile<W, fit<16>>},
          {exact_tile<W, fit<1>>, exact_tile<W, fit<2>>, exact_tile<W, fit<4>>,
           exact_tile<W, fit<8>>, exact_tile<W, fit<16>>},
          quantised_row<W>,
          W::panel_bytes};
}

template <class W> constexpr Tiles plain() {
  return {{},
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

// out [rows][16] = the first `rows` activations of a tile x one panel.
void product(const Matrix& matrix, int panel, const void* acts, bool exact, int rows, float* out) {
  const Tiles& tiles = tiles_of(matrix.type);
  const int blocks = ceil_div(matrix.columns, kBlock);
  const uint8_t* weights = matrix.data + panel * tiles.panel_bytes(blocks);
  const TileFn* by_rows = exact ? tiles.exact : tiles.fast;
  for (int row = 0; row < rows;) {
    int log = 0;
    const int left = rows - row;
    while ((2 << log) <= left && (2 << log) <= kMaxRows) ++log;
    // A larger kernel with idle rows beats two smaller ones if it wastes at most a quarter.
    if ((1 << log) < left && (2 << log) <= kMaxRows && left * 4 >= (2 << log) * 3) ++log;
    by_rows[log](weights, blocks, acts, row, out + row * kPanel);
    row += 1 << log;
  }
}

HR_INLINE F silu(F x) { return div(x, add(set1(1.0f), exponential(sub(zero(), x)))); }

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

void write_linear(const Op& op, const float* tile, int rows, int columns, float* out, int column) {
  const float* bias = op.bias ? op.bias + column : nullptr;
  for (int r = 0; r < rows; ++r, out += op.width, tile += kPanel) {
    if (columns == kPanel) {
      for (int lane = 0; lane < kPanel; lane += L) {
        F y = load(tile + lane);
        if (bias) y = add(y, load(bias + lane));
        if (op.flags & kAdd) y = add(y, load(out + lane));
        store(out + lane, y);
      }
    } else {
      for (int c = 0; c < columns; ++c) {
        float y = tile[c] + (bias ? bias[c] : 0.0f);
        out[c] = op.flags & kAdd ? out[c] + y : y;
      }
    }
  }
}

void write_gated(const float* gate, const float* up, int rows, int columns, float* out, int width) {
  for (int r = 0; r < rows; ++r, out += width, gate += kPanel, up += kPanel) {
    float y[kPanel];
    for (int lane = 0; lane < kPanel; lane += L) {
      store(y + lane, mul(silu(load(gate + lane)), load(up + lane)));
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
    tiles.row(matrix.data + id / kPanel * bytes, matrix.columns, id % kPanel,
              work.op->out + static_cast<int64_t>(t) * matrix.columns);
  }
}

void linear(const Work& work) {
  const Op& op = *work.op;
  const bool exact = op.flags & kExact;
  const int rows = rows_of(op, *work.step), panels = panels_of(op);
  const int group = panels_a_piece(op, work.threads), groups = ceil_div(panels, group);
  const int first_row = work.piece / groups * kRowsAPass, first = work.piece % groups * group;
  const int last_row = rows < first_row + kRowsAPass ? rows : first_row + kRowsAPass;
  const int blocks = ceil_div(op.parts[0]->columns, kBlock);
  const int64_t block_bytes = exact ? sizeof(ExactBlock) : sizeof(FastBlock);
  const int width = op.width;
  for (int panel = first; panel < first + group && panel < panels; ++panel) {
    const Place at = op.kind == kGated ? Place{op.parts[0], panel, panel * kPanel}
                                       : place_of(op, panel);
    const int left = at.matrix->rows - at.panel * kPanel;
    const int columns = left < kPanel ? left : kPanel;
    for (int row = first_row; row < last_row; row += kTile) {
      const int count = last_row - row < kTile ? last_row - row : kTile;
      const char* acts = static_cast<const char*>(op.acts) + row / kTile * blocks * block_bytes;
      // A kernel may fill idle rows after the last.
      alignas(64) float tile[kTile * kPanel], other[kTile * kPanel];
      float* out = op.out + static_cast<int64_t>(row) * width + at.column;
      product(*at.matrix, at.panel, acts, exact, count, tile);
      if (op.kind == kGated) {
        product(*op.parts[1], panel, acts, exact, count, other);
        write_gated(tile, other, count, columns, out, width);
      } else {
        write_linear(op, tile, count, columns, out, at.column);
      }
    }
  }
}

}  // namespace HR_ISA

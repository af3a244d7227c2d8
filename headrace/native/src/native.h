// What crosses the C ABI. headrace/native/library.py holds the same structures.
#pragma once
#include <stdint.h>

// A weight matrix [rows, columns] in panels of 16 rows; see formats.h for the panels of each type.
// `type` is ggml's number of the type that the weights came in.
struct Matrix {
  const uint8_t* data;
  int32_t type;
  int32_t rows;
  int32_t columns;  // a multiple of the type's block; plain floats: any
};

constexpr int kPanel = 16;  // rows of weights side by side
constexpr int kBlock = 32;  // columns that share one scale of the activations
constexpr int kTile = 16;   // rows of activations side by side

enum GgmlType : int32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

// One block of activations of a tile of 16 rows, as the kernels read them.
struct FastBlock {                // int8: x = scale * q
  int8_t q[kTile][kBlock];
  float scale[kTile];
  float sum[kTile];               // scale * (sum of q)
  float half_sum[2][kTile];       // the same of columns 0..15 and 16..31
};
struct ExactBlock {
  float x[kBlock][kTile];
};

enum OpKind : int32_t {
  kEmbed = 0,    // out[t] = scale * row ids[t] of parts[0]
  kQuantise,     // acts = x, or x normed by `weight`
  kLinear,       // out = acts * parts^T (+ bias) (+ out with kAdd); parts side by side
  kGated,        // out = f(acts * parts[0]^T (+ bias)) * (acts * parts[1]^T (+ bias)), f = silu, or
                 // gelu with kGelu
  kRotate,       // out = qkv: q normed by `weight`, turned and scaled in place; k normed by `k_norm`
                 // and turned, and v, to the cache of a layer. No norm where its weight is null
  kAttend,       // out = attention of the queries in x over the cache of a layer
  kPeaks,        // best[i], finite[i] of row i of x [head_count, stride], its first `width` columns
  kGather,       // out[i] = row head_rows[i] of x
  kAddNormed,    // out += x normed by `weight`, both [rows, width]
};
enum OpFlags : int32_t {
  kAdd = 1,
  kOfHead = 2,  // of head_count rows, not of `tokens`; attention: of the tokens in head_rows
  kExact = 4,  // acts are ExactBlocks; the only kind that plain float weights take
  kGelu = 8,   // x / (1 + e^(-2 sqrt(2 / pi) (x + 0.044715 x^3))): gelu by tanh
};

struct Op {
  int32_t kind;
  int32_t flags;
  int32_t part_count;
  int32_t width;             // columns of x (quantise), of out (linear, gated)
  const Matrix* const* parts;
  const float* x;            // [tokens, width] or [tokens, stride]
  float* out;
  const float* weight;       // of the norm, [width]
  const float* bias;         // [width], of a gated product [2 width]; or null
  void* acts;                // FastBlock or ExactBlock [tiles][blocks]
  void* k;                   // cache of the layer
  void* v;
  float* k_scales;           // int8 caches: [blocks, kv_heads, block_size]
  float* v_scales;
  float epsilon;             // of the norm
  int32_t window;            // positions a query sees, itself included; 0 = all
  int64_t* best;             // [head_count] first column of the largest value; 0 if not finite
  int32_t* finite;           // [head_count] 1: every value of the row is finite
  int32_t stride;            // floats between rows of x
  float scale;               // of rows of an embedding, of q
  float softcap;             // scores, or what a linear gives, become c tanh(x / c); 0: as they are
  int32_t group;             // of `tables`, for a layer's cache
  const float* k_norm;       // [head_dim]
  const float* cosines;      // [positions, head_dim / 2]
  const float* sines;
};

struct Step {
  int32_t tokens;
  int32_t head_count;          // tokens whose logits are wanted
  const int32_t* ids;          // [tokens]
  const int32_t* head_rows;    // [head_count] those tokens, each once
  const int32_t* rows;         // [tokens] row of `tables`
  const int32_t* positions;    // [tokens]
  const int32_t* writes;       // [tokens] 1: store k and v
  const int64_t* tables;       // [groups, table_rows, table_width] block ids
  int32_t table_width;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t block_size;          // tokens of a KV block
  int32_t kv_type;             // kF32, kF16, kBF16, or kQ8_0 for int8 with a scale a line
  int32_t table_rows;
};

// The block table of a token in the group of an op's layer.
inline const int64_t* table_of(const Op& op, const Step& step, int token) {
  const int64_t row = static_cast<int64_t>(op.group) * step.table_rows + step.rows[token];
  return step.tables + row * step.table_width;
}

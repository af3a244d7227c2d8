// What one instruction set offers, and how an op is cut into pieces that threads take.
#pragma once
#include "native.h"

// Queries [first, first + count) of a step: consecutive positions of one sequence.
struct Span {
  int32_t first;
  int32_t count;
};

struct Work {
  const Op* op;
  const Step* step;
  const Span* spans;  // of this attention
  int32_t threads;
  int32_t piece;      // 0 <= piece < pieces(op, ...)
  float* scratch;     // of this thread; scratch_floats(step) long
};

struct Kernels {
  const char* name;
  void (*embed)(const Work&);
  void (*quantise)(const Work&);
  void (*linear)(const Work&);  // kLinear and kGated
  void (*rotate)(const Work&);
  void (*attend)(const Work&);
  void (*peaks)(const Work&);
  void (*gather)(const Work&);
  void (*add_normed)(const Work&);
  bool (*quantise_rows)(int type, int source, int columns, const uint8_t* raw, int count,
                        uint8_t* out);
};

// The tables that were compiled in.
#if defined(HR_HAS_AVX512)
extern const Kernels k_avx512;
#endif
#if defined(HR_HAS_AVX2)
extern const Kernels k_avx2;
#endif
#if defined(HR_HAS_NEON)
extern const Kernels k_neon;
#endif
#if defined(HR_HAS_GENERIC)
extern const Kernels k_generic;
#endif

constexpr int kRowsAPiece = 4;     // of quantise, embed, rotate
constexpr int kRowsAPass = 256;    // of a linear: its activations stay in the second-level cache
constexpr int kQueriesATask = 96;  // of attention over several queries: tokens x heads of a group
constexpr int kFewTokens = 4;      // spans up to this long go token by token
constexpr int kKeys = 64;          // positions that attention takes at a time

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int round_up(int a, int b) { return ceil_div(a, b) * b; }

static inline int rows_of(const Op& op, const Step& step) {
  return op.flags & kOfHead ? step.head_count : step.tokens;
}

static inline int panels_of(const Op& op) {
  if (op.kind == kGated) return ceil_div(op.parts[0]->rows, kPanel);
  int panels = 0;
  for (int i = 0; i < op.part_count; ++i) panels += ceil_div(op.parts[i]->rows, kPanel);
  return panels;
}

// Several pieces a thread, so that one that the system holds up does not hold up the rest.
static inline int panels_a_piece(const Op& op, int threads) {
  const int piece = round_up(ceil_div(panels_of(op), threads * 4), 2);  // panels go in pairs
  return piece > 16 ? 16 : piece;
}

static inline int queries_a_task(const Step& step) {
  const int tokens = kQueriesATask / (step.heads / step.kv_heads);
  return tokens < 1 ? 1 : tokens;
}

static inline int64_t scratch_floats(const Step& step) {
  const int wide = round_up(step.head_dim, kPanel), group = step.heads / step.kv_heads;
  const int queries = round_up(group > kQueriesATask ? group : kQueriesATask, 4);
  return static_cast<int64_t>(wide) * kKeys * 2 + static_cast<int64_t>(queries) * (2 * wide + kKeys + 2);
}

// `spans`: of attention over the rows of this op.
static inline int pieces_of(const Op& op, const Step& step, int spans, int threads) {
  const int rows = rows_of(op, step);
  switch (op.kind) {
    case kLinear:
    case kGated:
      return ceil_div(rows, kRowsAPass) * ceil_div(panels_of(op), panels_a_piece(op, threads));
    case kAttend:
      return spans * step.kv_heads;
    case kPeaks:
      return step.head_count;
    default:
      return ceil_div(rows, kRowsAPiece);
  }
}

// Attention over the paged cache with an online softmax (https://arxiv.org/abs/2205.14135).
//
// A piece of work is one KV head and a span of queries of one sequence. A few queries read K row by
// row (the cost is the bytes); many queries turn a tile of K once and multiply it as matrices.
#include "attention.h"

#include <math.h>

#include "simd.h"

namespace HR_ISA {

namespace {

struct F32Lines {
  using Type = float;
  HR_INLINE F read(const float* p) { return load(p); }
};
struct F16Lines {
  using Type = uint16_t;
  HR_INLINE F read(const uint16_t* p) { return load_f16(p); }
};
struct BF16Lines {
  using Type = uint16_t;
  HR_INLINE F read(const uint16_t* p) { return load_bf16(p); }
};
struct I8Lines {
  using Type = int8_t;
  HR_INLINE F read(const int8_t* p) { return load_i8(p); }
};

// The first n < L values, zeros after them.
template <class K> HR_INLINE F read_some(const typename K::Type* p, int n) {
  typename K::Type some[L] = {};
  memcpy(some, p, n * sizeof some[0]);
  return K::read(some);
}

// K or V of one KV head of one sequence.
template <class T> struct Cache {
  const T* base;
  const float* scales;  // a line; null but for int8
  const int64_t* table;
  int32_t block_size, kv_heads, kv_head, width;
};

template <class T>
Cache<T> cache_of(const Work& work, const void* base, const float* scales, int token, int kv_head) {
  const Step& step = *work.step;
  return {static_cast<const T*>(base), step.kv_type == kQ8_0 ? scales : nullptr,
          table_of(*work.op, step, token), step.block_size, step.kv_heads, kv_head, step.head_dim};
}

// Pointers and scales of `count` positions from `start` on.
template <class T>
void find_lines(const Cache<T>& cache, int start, int count, const T** lines, float* scales) {
  // One division a call: they take as long as a whole line does.
  int at = start / cache.block_size, slot = start % cache.block_size;
  for (int i = 0; i < count; ++at, slot = 0) {
    int64_t line = (cache.table[at] * cache.kv_heads + cache.kv_head) * cache.block_size + slot;
    for (; slot < cache.block_size && i < count; ++slot, ++i, ++line) {
      lines[i] = cache.base + line * cache.width;
      if (cache.scales) scales[i] = cache.scales[line];
    }
  }
}

int first_position(int position, int window) {
  return window > 0 && position + 1 > window ? position + 1 - window : 0;
}

// `scores` has room for whole vectors.
HR_INLINE void cap_scores(float* scores, int count, float cap) {
  for (int i = 0; i < count; i += L) store(scores + i, capped(load(scores + i), cap));
}

// Turns scores [count] to e^(score - max) and returns what the earlier total is worth now.
HR_INLINE float soften(float* scores, int count, float* max, float* total) {
  F high = set1(-INFINITY);
  for (int i = count; i < round_up(count, L); ++i) scores[i] = -INFINITY;
  for (int i = 0; i < count; i += L) high = fmax(high, load(scores + i));
  const float tile = highest(high), next = tile > *max ? tile : *max;
  const float keep = *max == -INFINITY ? 0.0f : expf(*max - next);
  F sums = zero();
  for (int i = 0; i < count; i += L) {
    const F p = exponential(sub(load(scores + i), set1(next)));
    store(scores + i, p);
    sums = add(sums, p);
  }
  // e^-87 of the padding is nothing beside the 1 of the highest.
  *total = *total * keep + sum(sums);
  *max = next;
  return keep;
}

// ---- a few queries

// scores [G][kKeys] of the heads at q [G][width] against `count` lines.
template <class K, int G>
void score_lines(const typename K::Type* const* lines, int count, const float* q, int width,
                 float* scores) {
  const int whole = width / L * L, rest = width - whole;
  for (int start = 0; start < count; start += L) {
    F parts[G][L];
    for (int i = 0; i < L; ++i) {
      F acc[G];
      for (int g = 0; g < G; ++g) acc[g] = zero();
      if (start + i < count) {
        const typename K::Type* line = lines[start + i];
        for (int c = 0; c < whole; c += L) {
          const F k = K::read(line + c);
          for (int g = 0; g < G; ++g) acc[g] = fma(load(q + g * width + c), k, acc[g]);
        }
        if (rest) {
          const F k = read_some<K>(line + whole, rest);
          for (int g = 0; g < G; ++g) {
            acc[g] = fma(read_some<F32Lines>(q + g * width + whole, rest), k, acc[g]);
          }
        }
      }
      for (int g = 0; g < G; ++g) parts[g][i] = acc[g];
    }
    for (int g = 0; g < G; ++g) store(scores + g * kKeys + start, sum_each(parts[g]));
  }
}

// out [G][wide] = out * keep + scores * V, for C vectors of columns.
template <class K, int G, int C>
void add_values(const typename K::Type* const* lines, int count, const float* scores,
                const float* keep, int column, int rest, float* out, int wide) {
  F acc[G][C];
  for (int g = 0; g < G; ++g) {
    for (int c = 0; c < C; ++c) acc[g][c] = mul(load(out + g * wide + column + c * L), set1(keep[g]));
  }
  for (int i = 0; i < count; ++i) {
    const typename K::Type* line = lines[i] + column;
    F v[C];
    for (int c = 0; c < C; ++c) v[c] = rest ? read_some<K>(line, rest) : K::read(line + c * L);
    for (int g = 0; g < G; ++g) {
      const F p = set1(scores[g * kKeys + i]);
      for (int c = 0; c < C; ++c) acc[g][c] = fma(p, v[c], acc[g][c]);
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int c = 0; c < C; ++c) store(out + g * wide + column + c * L, acc[g][c]);
  }
}

// G heads of one token.
template <class K, int G>
void attend_heads(const Work& work, int token, int kv_head, int head) {
  using T = typename K::Type;
  const Op& op = *work.op;
  const Step& step = *work.step;
  const int width = step.head_dim, wide = round_up(width, kPanel);
  const int position = step.positions[token];
  const auto k_cache = cache_of<T>(work, op.k, op.k_scales, token, kv_head);
  const auto v_cache = cache_of<T>(work, op.v, op.v_scales, token, kv_head);
  const int64_t stride = static_cast<int64_t>(step.heads + 2 * step.kv_heads) * width;
  const float* q = op.x + token * stride + static_cast<int64_t>(head) * width;
  float* out = work.scratch;
  memset(out, 0, sizeof(float) * G * wide);
  alignas(64) float scores[G * kKeys];
  float max[G], total[G], keep[G], scales[kKeys];
  for (int g = 0; g < G; ++g) max[g] = -INFINITY, total[g] = 0.0f;
  for (int start = first_position(position, op.window); start <= position; start += kKeys) {
    const int count = position + 1 - start < kKeys ? position + 1 - start : kKeys;
    const T* lines[kKeys];
    find_lines(k_cache, start, count, lines, scales);
    score_lines<K, G>(lines, count, q, width, scores);
    for (int g = 0; g < G; ++g) {
      float* own = scores + g * kKeys;
      if (k_cache.scales) {
        for (int i = 0; i < count; ++i) own[i] *= scales[i];
      }
      if (op.softcap != 0.0f) cap_scores(own, count, op.softcap);
      keep[g] = soften(own, count, &max[g], &total[g]);
    }
    find_lines(v_cache, start, count, lines, scales);
    if (v_cache.scales) {
      for (int g = 0; g < G; ++g) {
        for (int i = 0; i < count; ++i) scores[g * kKeys + i] *= scales[i];
      }
    }
    constexpr int C = L == 16 ? 4 : 2;
    int column = 0;
    for (; column + C * L <= width; column += C * L) {
      add_values<K, G, C>(lines, count, scores, keep, column, 0, out, wide);
    }
    for (; column < width; column += L) {
      const int rest = width - column < L ? width - column : 0;
      add_values<K, G, 1>(lines, count, scores, keep, column, rest, out, wide);
    }
  }
  for (int g = 0; g < G; ++g) {
    float* y = op.out + (static_cast<int64_t>(token) * step.heads + head + g) * width;
    for (int c = 0; c < width; ++c) y[c] = out[g * wide + c] / total[g];
  }
}

template <class K> void attend_few(const Work& work, const Span& span, int kv_head) {
  const int group = work.step->heads / work.step->kv_heads;
  for (int token = span.first; token < span.first + span.count; ++token) {
    for (int g = 0; g < group;) {
      const int head = kv_head * group + g;
      switch (group - g) {
        case 1: attend_heads<K, 1>(work, token, kv_head, head); g += 1; break;
        case 2: attend_heads<K, 2>(work, token, kv_head, head); g += 2; break;
        case 3: attend_heads<K, 3>(work, token, kv_head, head); g += 3; break;
        default: attend_heads<K, 4>(work, token, kv_head, head); g += 4; break;
      }
    }
  }
}

// ---- many queries

// Scratch of one task. Queries are token-major: query i is head i % group of token i / group.
struct Many {
  int queries, padded, width, wide, group;
  float* keys;    // [width][kKeys], turned
  float* values;  // [kKeys][wide]
  float* q;       // [padded][wide]
  float* out;     // [padded][wide]
  float* scores;  // [padded][kKeys]
  float* max;     // [padded]
  float* total;   // [padded]
};

Many lay_out(const Work& work, const Span& span) {
  Many m;
  m.group = work.step->heads / work.step->kv_heads;
  m.queries = span.count * m.group, m.padded = round_up(m.queries, 4);
  m.width = work.step->head_dim, m.wide = round_up(m.width, kPanel);
  m.keys = work.scratch;
  m.values = m.keys + m.wide * kKeys;
  m.q = m.values + m.wide * kKeys;
  m.out = m.q + m.padded * m.wide;
  m.scores = m.out + m.padded * m.wide;
  m.max = m.scores + m.padded * kKeys;
  m.total = m.max + m.padded;
  return m;
}

void read_queries(const Work& work, const Span& span, int kv_head, const Many& m) {
  const Step& step = *work.step;
  const int64_t stride = static_cast<int64_t>(step.heads + 2 * step.kv_heads) * m.width;
  memset(m.q, 0, sizeof(float) * 2 * m.padded * m.wide);  // and `out`
  for (int i = 0; i < m.padded; ++i) {
    m.max[i] = -INFINITY, m.total[i] = 0.0f;
    if (i >= m.queries) continue;
    const int token = span.first + i / m.group, head = kv_head * m.group + i % m.group;
    memcpy(m.q + i * m.wide, work.op->x + token * stride + head * m.width,
           m.width * sizeof(float));
  }
}

// Keys turned to [width][kKeys] and values to float, zeros past `count`.
template <class K>
void read_tile(const Work& work, int token, int kv_head, int start, int count, const Many& m) {
  using T = typename K::Type;
  const auto k_cache = cache_of<T>(work, work.op->k, work.op->k_scales, token, kv_head);
  const auto v_cache = cache_of<T>(work, work.op->v, work.op->v_scales, token, kv_head);
  const T* lines[kKeys];
  float scales[kKeys];
  const int whole = m.width / L * L, rest = m.width - whole;
  alignas(64) float block[L * L];
  find_lines(k_cache, start, count, lines, scales);
  for (int i = 0; i < kKeys; i += L) {
    for (int c = 0; c < m.width; c += L) {
      for (int j = 0; j < L; ++j) {
        F k = zero();
        if (i + j < count) {
          k = c < whole ? K::read(lines[i + j] + c) : read_some<K>(lines[i + j] + c, rest);
          if (k_cache.scales) k = mul(k, set1(scales[i + j]));
        }
        store(block + j * L, k);
      }
      transpose(block);
      for (int j = 0; j < L && c + j < m.width; ++j) {
        store(m.keys + (c + j) * kKeys + i, load(block + j * L));
      }
    }
  }
  find_lines(v_cache, start, count, lines, scales);
  for (int i = 0; i < kKeys; ++i) {
    for (int c = 0; c < m.width; c += L) {
      F v = zero();
      if (i < count) {
        v = c < whole ? K::read(lines[i] + c) : read_some<K>(lines[i] + c, rest);
        if (v_cache.scales) v = mul(v, set1(scales[i]));
      }
      store(m.values + i * m.wide + c, v);
    }
  }
}

// out [4][columns] (+)= a [4][depth] * b [depth][columns], for C vectors of columns.
template <int C>
HR_INLINE void multiply(const float* a, int a_stride, const float* b, int b_stride, int depth,
                        const float* keep, float* out, int out_stride) {
  F acc[4][C];
  for (int i = 0; i < 4; ++i) {
    for (int c = 0; c < C; ++c) {
      acc[i][c] = keep ? mul(load(out + i * out_stride + c * L), set1(keep[i])) : zero();
    }
  }
  for (int d = 0; d < depth; ++d) {
    F v[C];
    for (int c = 0; c < C; ++c) v[c] = load(b + d * b_stride + c * L);
    for (int i = 0; i < 4; ++i) {
      const F x = set1(a[i * a_stride + d]);
      for (int c = 0; c < C; ++c) acc[i][c] = fma(x, v[c], acc[i][c]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int c = 0; c < C; ++c) store(out + i * out_stride + c * L, acc[i][c]);
  }
}

// Positions [start, start + count) for four queries from `i` on.
void fold_tile(const Work& work, const Span& span, const Many& m, int i, int start, int count) {
  constexpr int C = L == 16 ? 4 : 2;
  const float* q = m.q + i * m.wide;
  float* scores = m.scores + i * kKeys;
  for (int key = 0; key < kKeys; key += C * L) {
    multiply<C>(q, m.wide, m.keys + key, kKeys, m.width, nullptr, scores + key, kKeys);
  }
  float keep[4];
  for (int j = 0; j < 4; ++j) {
    const int query = i + j < m.queries ? i + j : m.queries - 1;
    const int position = work.step->positions[span.first + query / m.group];
    const int low = first_position(position, work.op->window) - start;
    const int first = low > 0 ? low : 0;
    const int last = position + 1 - start < count ? position + 1 - start : count;
    float* own = scores + j * kKeys;
    keep[j] = 1.0f;
    if (first < last) {
      if (work.op->softcap != 0.0f) cap_scores(own, last, work.op->softcap);
      for (int p = 0; p < first; ++p) own[p] = -INFINITY;
      keep[j] = soften(own, last, &m.max[i + j], &m.total[i + j]);
    }
    for (int p = 0; p < (first < last ? first : kKeys); ++p) own[p] = 0.0f;
    for (int p = first < last ? last : kKeys; p < kKeys; ++p) own[p] = 0.0f;
  }
  float* out = m.out + i * m.wide;
  int column = 0;
  for (; column + C * L <= m.wide; column += C * L) {
    multiply<C>(scores, kKeys, m.values + column, m.wide, count, keep, out + column, m.wide);
  }
  for (; column < m.wide; column += L) {
    multiply<1>(scores, kKeys, m.values + column, m.wide, count, keep, out + column, m.wide);
  }
}

template <class K> void attend_many(const Work& work, const Span& span, int kv_head) {
  const Step& step = *work.step;
  const Many m = lay_out(work, span);
  read_queries(work, span, kv_head, m);
  const int top = step.positions[span.first + span.count - 1];
  for (int start = first_position(step.positions[span.first], work.op->window); start <= top;
       start += kKeys) {
    const int count = top + 1 - start < kKeys ? top + 1 - start : kKeys;
    read_tile<K>(work, span.first, kv_head, start, count, m);
    for (int i = 0; i < m.padded; i += 4) fold_tile(work, span, m, i, start, count);
  }
  for (int i = 0; i < m.queries; ++i) {
    const int64_t token = span.first + i / m.group, head = kv_head * m.group + i % m.group;
    float* y = work.op->out + (token * step.heads + head) * m.width;
    for (int c = 0; c < m.width; ++c) y[c] = m.out[i * m.wide + c] / m.total[i];
  }
}

template <class K> void attend_span(const Work& work, const Span& span, int kv_head) {
  span.count <= kFewTokens ? attend_few<K>(work, span, kv_head)
                           : attend_many<K>(work, span, kv_head);
}

}  // namespace

void attend(const Work& work) {
  const Span& span = work.spans[work.piece / work.step->kv_heads];
  const int kv_head = work.piece % work.step->kv_heads;
  switch (work.step->kv_type) {
    case kF32: return attend_span<F32Lines>(work, span, kv_head);
    case kF16: return attend_span<F16Lines>(work, span, kv_head);
    case kBF16: return attend_span<BF16Lines>(work, span, kv_head);
    default: return attend_span<I8Lines>(work, span, kv_head);
  }
}

}  // namespace HR_ISA

// Runs every op of a kernel table on random input, the same on every machine, and writes the results
// to a file: driver NAME_OF_THE_TABLE FILE. scripts/native_neon compares such files.
//
// A record: name and type of the numbers, a line each; how many, a line; the numbers.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <string>
#include <vector>

#include "kernels.h"
#include "simd.h"

extern "C" {
int64_t hr_packed_bytes(int32_t type, int32_t rows, int32_t columns);
void hr_pack_rows(int32_t type, int32_t columns, const uint8_t* raw, int32_t count,
                  const int32_t* targets, uint8_t* out);
int32_t hr_quantise_rows(int32_t type, int32_t source, int32_t columns, const uint8_t* raw,
                         int32_t count, uint8_t* out, const char* isa);
void* hr_pool_new(int32_t threads, int32_t spin_us, const char* isa);
void hr_pool_free(void* pool);
void hr_run(void* pool, const Op* ops, int32_t count, const Step* step);
}

namespace {

using HR_ISA::float_to_bfloat;
using HR_ISA::float_to_half;

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

// PCG: the same numbers everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const uint32_t shifted = static_cast<uint32_t>(((state_ >> 18) ^ state_) >> 27);
    const int turn = static_cast<int>(state_ >> 59);
    return shifted >> turn | shifted << (-turn & 31);
  }
  float unit() { return static_cast<float>(bits() >> 8) * 0x1p-23f - 1.0f; }  // [-1, 1)
  Floats floats(size_t count) {
    Floats out(count);
    for (float& x : out) x = unit() * 2.0f;
    return out;
  }
  Bytes bytes(size_t count) {
    Bytes out(count);
    for (uint8_t& x : out) x = static_cast<uint8_t>(bits() >> 24);
    return out;
  }

 private:
  uint64_t state_;
};

struct Layout {
  const char* name;
  int type, block, bytes;
  std::vector<int> halves;  // where the half-precision scales of a block are
};
const Layout kLayouts[] = {
    {"Q4_0", kQ4_0, 32, 18, {0}},      {"Q4_1", kQ4_1, 32, 20, {0, 2}},
    {"Q5_0", kQ5_0, 32, 22, {0}},      {"Q5_1", kQ5_1, 32, 24, {0, 2}},
    {"Q8_0", kQ8_0, 32, 34, {0}},      {"Q4_K", kQ4_K, 256, 144, {0, 2}},
    {"Q5_K", kQ5_K, 256, 176, {0, 2}}, {"Q6_K", kQ6_K, 256, 210, {208}},
    {"F32", kF32, 1, 4, {}},           {"F16", kF16, 1, 2, {}},
    {"BF16", kBF16, 1, 2, {}},
};
bool is_plain(const Layout& layout) { return layout.block == 1; }

Bytes random_rows(Random& random, const Layout& layout, int rows, int columns) {
  const size_t blocks = static_cast<size_t>(rows) * columns / layout.block;
  Bytes raw = random.bytes(blocks * layout.bytes);
  for (size_t b = 0; b < blocks; ++b) {
    uint8_t* block = raw.data() + b * layout.bytes;
    const float x = random.unit();
    const uint16_t half = layout.type == kBF16 ? float_to_bfloat(x) : float_to_half(x);
    if (layout.type == kF32) memcpy(block, &x, sizeof x);
    if (layout.bytes == 2) memcpy(block, &half, sizeof half);
    for (const int at : layout.halves) {
      const uint16_t scale = float_to_half(random.unit() * 0.1f);
      memcpy(block + at, &scale, sizeof scale);
    }
  }
  return raw;
}

struct Packed {
  Bytes memory;
  Matrix matrix;
};

Packed pack(const Layout& layout, const Bytes& raw, int rows, int columns) {
  Packed out;
  out.memory.resize(hr_packed_bytes(layout.type, rows, columns) + 64);
  uint8_t* data = out.memory.data() + (64 - reinterpret_cast<uintptr_t>(out.memory.data()) % 64);
  std::vector<int32_t> targets(rows);
  for (int i = 0; i < rows; ++i) targets[i] = i;
  hr_pack_rows(layout.type, columns, raw.data(), rows, targets.data(), data);
  out.matrix = {data, layout.type, rows, columns};
  return out;
}

class Driver {
 public:
  Driver(const char* isa, FILE* file) : isa_(isa), pool_(hr_pool_new(2, 20, isa)), file_(file) {
    if (!pool_) exit(3);
  }
  ~Driver() { hr_pool_free(pool_); }

  void all() {
    for (const Layout& layout : kLayouts) {
      for (const int rows : {1, 2, 3, 5, 8, 13, 16, 17, 31, 70}) {
        products(layout, rows, true);
        if (!is_plain(layout)) products(layout, rows, false);
      }
      rows_back(layout);
    }
    for (const int type : {kF32, kF16, kBF16, kQ8_0}) {
      for (const int head_dim : {64, 80, 6}) {
        for (const int window : {0, 7}) attention(type, head_dim, window);
      }
    }
    norm();
    peaks();
    quantised();
  }

 private:
  template <class T> void keep(const std::string& name, const char* type, const T* data, size_t n) {
    fprintf(file_, "%s\n%s\n%zu\n", name.c_str(), type, n);
    fwrite(data, sizeof(T), n, file_);
  }
  void keep(const std::string& name, const Floats& x) { keep(name, "float32", x.data(), x.size()); }

  void run(const std::vector<Op>& ops, const Step& step) {
    hr_run(pool_, ops.data(), static_cast<int32_t>(ops.size()), &step);
  }

  // A product with a bias and a residual, and a gated one. int8 activations are those of x itself:
  // only multiplications lie before the rounding, so that every machine rounds the same numbers.
  void products(const Layout& layout, int rows, bool exact) {
    Random random(layout.type * 100 + rows);
    const int columns = layout.block == 256 ? 512 : 96, width = 53;
    const Packed first = pack(layout, random_rows(random, layout, width, columns), width, columns);
    const Packed second = pack(layout, random_rows(random, layout, width, columns), width, columns);
    const Matrix* parts[] = {&first.matrix, &second.matrix};
    const Floats x = random.floats(rows * columns), bias = random.floats(2 * width);
    Floats side = random.floats(rows * 2 * width), gated(rows * width, NAN);
    Bytes acts(ceil_div(rows, kTile) * (columns / kBlock) * sizeof(ExactBlock), 0xff);
    Op quantise{}, linear{}, gate{};
    quantise.kind = kQuantise;
    quantise.flags = linear.flags = gate.flags = exact ? kExact : 0;
    quantise.width = columns;
    quantise.x = x.data();
    quantise.acts = linear.acts = gate.acts = acts.data();
    linear.kind = kLinear;
    gate.kind = kGated;
    linear.flags |= kAdd;
    linear.parts = gate.parts = parts;
    linear.part_count = gate.part_count = 2;
    linear.width = 2 * width;
    linear.bias = bias.data();
    linear.out = side.data();
    gate.width = width;
    gate.out = gated.data();
    Step step{};
    step.tokens = rows;
    step.heads = step.kv_heads = 1;
    step.head_dim = 16;
    run({quantise, linear, gate}, step);
    const std::string name = std::string(layout.name) + (exact ? " exact " : " fast ");
    keep(name + "linear x " + std::to_string(rows), side);
    keep(name + "gated x " + std::to_string(rows), gated);
    gate.flags |= kGelu;
    gate.bias = bias.data();
    run({quantise, gate}, step);
    keep(name + "gelu x " + std::to_string(rows), gated);
  }

  void rows_back(const Layout& layout) {
    Random random(layout.type);
    const int columns = layout.block == 256 ? 512 : 96;
    const Packed packed = pack(layout, random_rows(random, layout, 37, columns), 37, columns);
    const Matrix* parts[] = {&packed.matrix};
    const int32_t ids[] = {36, 0, 16, 15, 3}, heads[] = {4, 1, 2};
    Floats out(5 * columns, NAN), some(3 * columns, NAN);
    Op embed{}, gather{};
    embed.kind = kEmbed;
    embed.scale = 1.0f;
    embed.parts = parts;
    embed.part_count = 1;
    embed.out = out.data();
    gather.kind = kGather;
    gather.flags = kOfHead;
    gather.width = columns;
    gather.x = out.data();
    gather.out = some.data();
    Step step{};
    step.tokens = 5;
    step.ids = ids;
    step.head_count = 3;
    step.head_rows = heads;
    step.heads = step.kv_heads = 1;
    step.head_dim = 16;
    run({embed, gather}, step);
    keep(std::string(layout.name) + " embed", out);
    keep(std::string(layout.name) + " gather", some);
  }

  // Sequences of [cached, new] tokens: rotation, the writes, then attention over the cache.
  void attention(int type, int head_dim, int window) {
    constexpr int kHeads = 6, kKvHeads = 2, kSize = 16, kWidth = 20;
    Random random(type * 1000 + head_dim + window);
    const std::vector<std::pair<int, int>> sequences = {{0, 1}, {70, 1}, {0, 45}, {200, 33}, {17, 3}};
    std::vector<int32_t> rows, positions, writes;
    std::vector<int64_t> tables;
    for (size_t row = 0; row < sequences.size(); ++row) {
      for (int i = 0; i < kWidth; ++i) tables.push_back((row * kWidth + i) * 37 % 101);
      for (int i = 0; i < sequences[row].second; ++i) {
        rows.push_back(static_cast<int32_t>(row));
        positions.push_back(sequences[row].first + i);
        writes.push_back(i % 5 != 4);
      }
    }
    const int tokens = static_cast<int>(rows.size()), half = head_dim / 2;
    const size_t lines = 101 * kKvHeads * kSize, numbers = lines * head_dim;
    Bytes k = cache(random, type, numbers), v = cache(random, type, numbers);
    Floats k_scales = random.floats(lines), v_scales = random.floats(lines);
    Floats qkv = random.floats(static_cast<size_t>(tokens) * (kHeads + 2 * kKvHeads) * head_dim);
    Floats out(static_cast<size_t>(tokens) * kHeads * head_dim, NAN);
    const Floats cosines = random.floats(256 * half), sines = random.floats(256 * half);
    const Floats weights = random.floats(2 * head_dim);
    Op rotate{}, attend{};
    rotate.kind = kRotate;
    attend.kind = kAttend;
    rotate.out = qkv.data();
    attend.x = qkv.data();
    attend.out = out.data();
    rotate.k = attend.k = k.data();
    rotate.v = attend.v = v.data();
    rotate.k_scales = attend.k_scales = k_scales.data();
    rotate.v_scales = attend.v_scales = v_scales.data();
    attend.window = window;
    attend.softcap = window ? 1.5f : 0.0f;
    rotate.weight = window ? weights.data() : nullptr;
    rotate.k_norm = window ? weights.data() + head_dim : nullptr;
    rotate.epsilon = 1e-5f;
    rotate.scale = 0.3f;
    rotate.cosines = cosines.data();
    rotate.sines = sines.data();
    Step step{};
    step.tokens = tokens;
    step.rows = rows.data();
    step.positions = positions.data();
    step.writes = writes.data();
    step.tables = tables.data();
    step.table_width = kWidth;
    step.heads = kHeads;
    step.kv_heads = kKvHeads;
    step.head_dim = head_dim;
    step.block_size = kSize;
    step.kv_type = type;
    run({rotate, attend}, step);
    const char* stored = type == kF32 ? "float32" : type == kF16 ? "float16" : type == kBF16 ? "bfloat16" : "int8";
    const std::string name = std::string(stored) + " cache, head of " + std::to_string(head_dim) +
                             ", window " + std::to_string(window) + ": ";
    keep(name + "turned", qkv);
    keep(name + "k scales", k_scales);
    for (const auto& [what, bytes] : {std::pair<const char*, const Bytes&>{"k", k}, {"v", v}}) {
      fprintf(file_, "%s\n%s\n%zu\n", (name + what).c_str(), stored, numbers);
      fwrite(bytes.data(), 1, bytes.size(), file_);
    }
    keep(name + "attention", out);
  }

  static Bytes cache(Random& random, int type, size_t numbers) {
    if (type == kQ8_0) {
      Bytes out = random.bytes(numbers);
      for (uint8_t& x : out) x = x == 128 ? 0 : x;
      return out;
    }
    Bytes out(numbers * (type == kF32 ? 4 : 2));
    for (size_t i = 0; i < numbers; ++i) {
      const float x = random.unit();
      const uint16_t half = type == kF16 ? float_to_half(x) : float_to_bfloat(x);
      if (type == kF32) memcpy(out.data() + 4 * i, &x, 4);
      if (type != kF32) memcpy(out.data() + 2 * i, &half, 2);
    }
    return out;
  }

  void norm() {
    Random random(7);
    const int rows = 19, columns = 96;
    const Floats x = random.floats(rows * columns), weight = random.floats(columns);
    Floats acts(ceil_div(rows, kTile) * (columns / kBlock) * sizeof(ExactBlock) / sizeof(float), 0);
    Op op{};
    op.kind = kQuantise;
    op.flags = kExact;
    op.width = columns;
    op.x = x.data();
    op.weight = weight.data();
    op.epsilon = 1e-5f;
    op.acts = acts.data();
    Step step{};
    step.tokens = rows;
    step.heads = step.kv_heads = 1;
    step.head_dim = 16;
    run({op}, step);
    keep("norm", acts);
    Floats out = random.floats(rows * columns);
    op.kind = kAddNormed;
    op.out = out.data();
    run({op}, step);
    keep("sum with a norm", out);
  }

  void peaks() {
    Random random(8);
    const int rows = 6, width = 75;
    Floats x = random.floats(rows * width);
    for (float& value : x) value = floorf(value * 3.0f);  // ties are common: the first counts
    x[width + 3] = NAN;
    x[2 * width + 74] = INFINITY;
    x[3 * width + 8] = -INFINITY;
    std::vector<int64_t> best(rows, -7);
    std::vector<int32_t> finite(rows, -7);
    Op op{};
    op.kind = kPeaks;
    op.width = op.stride = width;
    op.x = x.data();
    op.best = best.data();
    op.finite = finite.data();
    Step step{};
    step.head_count = rows;
    step.heads = step.kv_heads = 1;
    step.head_dim = 16;
    run({op}, step);
    for (int i = 0; i < rows; ++i) best[i] = finite[i] ? best[i] : 0;
    keep("peaks: best", "int64", best.data(), best.size());
    keep("peaks: finite", "int32", finite.data(), finite.size());
  }

  // Blocks made from floats, given back as floats by the embedding.
  void quantised() {
    for (const int type : {kQ4_1, kQ8_0}) {
      const Layout& layout = kLayouts[type == kQ4_1 ? 1 : 4];
      const int rows = 40, columns = 96;
      Random random(9);
      const Floats x = random.floats(rows * columns);
      Bytes raw(rows * columns / kBlock * layout.bytes);
      if (!hr_quantise_rows(type, kF32, columns, reinterpret_cast<const uint8_t*>(x.data()), rows,
                            raw.data(), isa_)) {
        exit(4);
      }
      const Packed packed = pack(layout, raw, rows, columns);
      const Matrix* parts[] = {&packed.matrix};
      std::vector<int32_t> ids(rows);
      for (int i = 0; i < rows; ++i) ids[i] = i;
      Floats out(rows * columns, NAN);
      Op embed{};
      embed.kind = kEmbed;
    embed.scale = 1.0f;
      embed.parts = parts;
      embed.part_count = 1;
      embed.out = out.data();
      Step step{};
      step.tokens = rows;
      step.ids = ids.data();
      step.heads = step.kv_heads = 1;
      step.head_dim = 16;
      run({embed}, step);
      keep(std::string("quantised to ") + layout.name, out);
    }
  }

  const char* isa_;
  void* pool_;
  FILE* file_;
};

}  // namespace

int main(int argc, char** argv) {
  FILE* file = argc == 3 ? fopen(argv[2], "wb") : nullptr;
  if (!file) return 2;
  Driver(argv[1], file).all();
  return fclose(file);
}

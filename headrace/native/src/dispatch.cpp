// The C ABI, and which instruction set this processor gets.
//
// A library may hold one table (what the machine that built it runs best) or several.
#include <string.h>
#if defined(HR_HAS_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "pack.h"
#include "pool.h"

namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif
#if defined(HR_HAS_NEON)
bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Apple processor of this architecture
#endif
}
#endif

// The table called `name`, or the best one for an empty name; null if none can run here.
const Kernels* find(const char* name) {
  const bool any = name[0] == '\0';
#if defined(HR_HAS_AVX512)
  if (has_avx512() && (any || !strcmp(name, k_avx512.name))) return &k_avx512;
#endif
#if defined(HR_HAS_AVX2)
  if (has_avx2() && (any || !strcmp(name, k_avx2.name))) return &k_avx2;
#endif
#if defined(HR_HAS_NEON)
  if (has_dot_products() && (any || !strcmp(name, k_neon.name))) return &k_neon;
#endif
#if defined(HR_HAS_GENERIC)
  if (any || !strcmp(name, k_generic.name)) return &k_generic;
#endif
  return nullptr;
}

}  // namespace

extern "C" {

// Sizes of the structures that cross, so that the other side can check its own.
int64_t hr_size_of(int32_t what) {
  switch (what) {
    case 0: return sizeof(Matrix);
    case 1: return sizeof(Op);
    case 2: return sizeof(Step);
    case 3: return sizeof(FastBlock);
    case 4: return sizeof(ExactBlock);
    default: return -1;
  }
}

int64_t hr_packed_bytes(int32_t type, int32_t rows, int32_t columns) {
  return HR_ISA::packed_bytes(type, rows, columns);
}

void hr_pack_rows(int32_t type, int32_t columns, const uint8_t* raw, int32_t count,
                  const int32_t* targets, uint8_t* out) {
  HR_ISA::pack_rows(type, columns, raw, count, targets, out);
}

// 1: rows of `source` floats became rows of `type` at `out`. 0: no such pair of types, or blocks do
// not fill a row, or the instruction set (see `find`) is not here.
int32_t hr_quantise_rows(int32_t type, int32_t source, int32_t columns, const uint8_t* raw,
                         int32_t count, uint8_t* out, const char* isa) {
  const Kernels* kernels = find(isa);
  return kernels && kernels->quantise_rows(type, source, columns, raw, count, out);
}

// Null if this processor or this library lacks the instruction set. See Pool for the other arguments.
void* hr_pool_new(int32_t threads, int32_t spin_us, const char* isa) {
  const Kernels* kernels = find(isa);
  return kernels ? new Pool(threads, spin_us, kernels) : nullptr;
}

void hr_pool_free(void* pool) { delete static_cast<Pool*>(pool); }

const char* hr_pool_isa(void* pool) { return static_cast<Pool*>(pool)->kernels()->name; }

void hr_run(void* pool, const Op* ops, int32_t count, const Step* step) {
  static_cast<Pool*>(pool)->run(ops, count, *step);
}

}  // extern "C"

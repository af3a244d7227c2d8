// From rows as GGUF stores them to panels.
#pragma once
#include "native.h"

namespace HR_ISA {

// Bytes of a matrix; -1 if the type is unknown or its blocks do not fill a row.
int64_t packed_bytes(int type, int rows, int columns);

// `raw`: `count` rows as ggml stores them; row i becomes row targets[i] of the matrix at `out`,
// which was zeroed when it was made.
void pack_rows(int type, int columns, const uint8_t* raw, int count, const int32_t* targets,
               uint8_t* out);

}  // namespace HR_ISA

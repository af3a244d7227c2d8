// Plain floats to the quantised blocks of ggml, for checkpoints that come unquantised.
#pragma once
#include "native.h"

namespace HR_ISA {

// `raw`: `count` rows of `columns` floats of type `source`, one after another. `out`: as many rows of
// `type` as ggml stores them. A block that holds a value that is not finite becomes NaN as a whole.
// False, and nothing done: no such pair of types, or `columns` is no multiple of 32.
bool quantise_rows(int type, int source, int columns, const uint8_t* raw, int count, uint8_t* out);

}  // namespace HR_ISA

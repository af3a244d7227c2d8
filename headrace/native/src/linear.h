// Matrix products of one instruction set.
#pragma once
#include "kernels.h"

namespace HR_ISA {

void embed(const Work& work);
void linear(const Work& work);  // kLinear and kGated

// Bytes of one panel of 16 rows.
int64_t panel_bytes(int type, int columns);

}  // namespace HR_ISA

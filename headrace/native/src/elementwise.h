// Row ops of one instruction set.
#pragma once
#include "kernels.h"

namespace HR_ISA {

void quantise(const Work& work);
void rotate(const Work& work);
void peaks(const Work& work);
void gather(const Work& work);
void add_normed(const Work& work);

}  // namespace HR_ISA

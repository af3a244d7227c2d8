// Paged attention of one instruction set.
#pragma once
#include "kernels.h"

namespace HR_ISA {

void attend(const Work& work);

}  // namespace HR_ISA

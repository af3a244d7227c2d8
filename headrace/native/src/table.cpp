// The table of one instruction set; compiled once for each.
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "quantise.h"

#define HR_TEXT_(x) #x
#define HR_TEXT(x) HR_TEXT_(x)

extern const Kernels HR_TABLE;
const Kernels HR_TABLE = {
    HR_TEXT(HR_ISA), HR_ISA::embed,  HR_ISA::quantise, HR_ISA::linear,
    HR_ISA::rotate,  HR_ISA::attend, HR_ISA::peaks,    HR_ISA::gather,
    HR_ISA::add_normed, HR_ISA::quantise_rows,
};

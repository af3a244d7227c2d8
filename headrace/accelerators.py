"""Accelerators as data: memory, and the two rates that bound a step.

Rates are the makers' own, for one card: dense (no sparsity) products of bfloat16 with sums in
float32, and reads of the card's memory. No program reaches them whole. docs/plan.md has what each
source prints, and how it was checked.

Memory in decimal gigabytes, as the makers count it; what a driver shows is a little less or more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

_GB, _TFLOPS = 10**9, 10**12
_VECTOR, _MATRIX = 8192, 1536  # sides of what `processor` multiplies: 256 MiB, and 9 MiB


class Accelerator(msgspec.Struct, frozen=True):
    """One device. `source`: where its figures come from."""

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    flops_per_s: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOPs a byte read, from which on products and not memory bound a step."""
        return self.flops_per_s / self.read_bytes_per_s


def _card(
    name: str, memory_gb: int, read_gb_per_s: float, tflops: float, source: str
) -> Accelerator:
    return Accelerator(name, memory_gb * _GB, read_gb_per_s * _GB, tflops * _TFLOPS, source)


ACCELERATORS: Mapping[str, Accelerator] = {
    card.name: card
    for card in (
        _card("h100", 80, 3350, 989.4, "H100 SXM5 data sheet"),
        _card("h100-pcie", 80, 2000, 756.5, "H100 PCIe data sheet"),
        _card("h200", 141, 4800, 989.4, "H200 SXM data sheet"),
        _card("a100", 80, 2039, 312, "A100 SXM4 80 GB data sheet"),
        _card("l4", 24, 300, 121, "L4 data sheet"),
        _card("l40s", 48, 864, 366.5, "L40S data sheet, half of its sparse rate"),
        _card("mi300x", 192, 5300, 1307.4, "MI300X data sheet"),
        _card("b200", 180, 8000, 2250, "DGX B200 data sheet, an eighth"),
        _card("gaudi3", 128, 3670, 1835, "Gaudi 3, Hot Chips 2024"),
        _card("4090", 24, 1008, 165.2, "Ada architecture white paper"),
    )
}


def processor(rounds: int = 5) -> Accelerator:
    """This machine's processor, measured: a matrix times a vector for the rate of reads, a square
    matrix times another for that of products, float32, by NumPy's own library. Some 0.5 s.

    Code with narrower types, as our native kernels' int8, can be faster than these products.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wide = np.ones((_VECTOR, _VECTOR), np.float32)
    vector = np.ones(_VECTOR, np.float32)
    read_s = _least_s(lambda: wide @ vector, rounds)
    square = np.ones((_MATRIX, _MATRIX), np.float32)
    product_s = _least_s(lambda: square @ square, rounds)
    return Accelerator(
        "cpu",
        memory,
        wide.nbytes / read_s,
        2 * _MATRIX**3 / product_s,
        "measured here, float32",
    )


def _least_s(work: Callable[[], object], rounds: int) -> float:
    found = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return min(found)

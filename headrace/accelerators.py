"""Accelerators as data: memory, and the two rates that bound a step.

Rates are the makers' own, for one card: dense (no sparsity) products of bfloat16 with sums in
float32, and reads of the card's memory. No program reaches them whole.

    h100   NVIDIA H100 SXM5 80 GB, data sheet: 3.35 TB/s, 1979 TFLOPS with sparsity, half without
    h200   NVIDIA H200 SXM 141 GB, data sheet: 4.8 TB/s, the same processor
    a100   NVIDIA A100 SXM4 80 GB, data sheet: 2039 GB/s, 312 TFLOPS
    l4     NVIDIA L4 24 GB, data sheet: 300 GB/s, 242 TFLOPS with sparsity, half without
    l40s   NVIDIA L40S 48 GB, data sheet: 864 GB/s, 362 TFLOPS
    mi300x AMD Instinct MI300X 192 GB, data sheet: 5.3 TB/s, 1307.4 TFLOPS
    b200   NVIDIA B200, an eighth of the HGX B200 data sheet: 180 GB, 8 TB/s (64 TB/s in all),
           4.5 PFLOPS with sparsity, half without
    4090   NVIDIA GeForce RTX 4090 24 GB, Ada architecture white paper: 1008 GB/s, 165.2 TFLOPS

Memory in decimal gigabytes, as the makers count it; what a driver shows is a little less or more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

_GB, _TB, _TFLOPS = 10**9, 10**12, 10**12
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


def _card(name: str, memory_gb: int, read_gb_per_s: float, tflops: float) -> Accelerator:
    rates = read_gb_per_s * _GB, tflops * _TFLOPS
    return Accelerator(name, memory_gb * _GB, *rates, "the maker's data sheet")


ACCELERATORS: Mapping[str, Accelerator] = {
    card.name: card
    for card in (
        _card("h100", 80, 3350, 989.5),
        _card("h200", 141, 4800, 989.5),
        _card("a100", 80, 2039, 312),
        _card("l4", 24, 300, 121),
        _card("l40s", 48, 864, 362),
        _card("mi300x", 192, 5300, 1307.4),
        _card("b200", 180, 8000, 2250),
        _card("4090", 24, 1008, 165.2),
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
        "cpu", memory, wide.nbytes / read_s, 2 * _MATRIX**3 / product_s, "measured here, float32"
    )


def _least_s(work: Callable[[], object], rounds: int) -> float:
    found = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return min(found)

"""MXFP4: 32 numbers of 4 bits (sign, two bits of exponent, one of fraction) share a power of two.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import torch
from torch import Tensor

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of a scale's exponent


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., groups, 16] uint8, the lower half of a byte first; scales [..., groups] uint8
    -> [..., groups * 32] float32, exact."""
    assert blocks.dtype == scales.dtype == torch.uint8, "bytes"
    assert blocks.shape == (*scales.shape, 16), (blocks.shape, scales.shape)
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).int()  # [..., groups, 16, 2]
    numbers = table[codes].flatten(-2)
    exponents = scales.int()[..., None] - _BIAS
    return torch.ldexp(numbers, exponents).flatten(-2)

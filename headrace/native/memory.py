"""Memory that the kernels read and write, as numpy arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGN_BYTES = 64  # a cache line, and the widest register


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros on a cache line's edge. Many of them take memory only once they are written: numpy asks
    the system for zeros."""
    kind = np.dtype(dtype)
    size_bytes = math.prod(shape) * kind.itemsize
    raw = np.zeros(size_bytes + ALIGN_BYTES, np.uint8)
    first = -raw.ctypes.data % ALIGN_BYTES
    return raw[first : first + size_bytes].view(kind).reshape(shape)

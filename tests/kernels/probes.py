"""Kernels that call one device function each, so that a test sees what it returns."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.philox import uniform
from headrace.kernels.weights import ordered, unordered


@triton.jit
def uniform_kernel(words, out):
    """Grid (n,): words [n, 4] int32 of seed low, seed high, choice, position; out [n] float64."""
    i = tl.program_id(0)
    w = words + i * 4
    u = uniform(tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3))
    tl.store(out + i, u)


@triton.jit
def keys_kernel(z, keys, back, N: tl.constexpr):
    """z [N] float32 -> its keys [N] int32, and back [N] float32 of the keys."""
    i = tl.arange(0, N)
    key = ordered(tl.load(z + i))
    tl.store(keys + i, key)
    tl.store(back + i, unordered(key))


@triton.jit
def beyond_any_card(x, N: tl.constexpr):
    """Does not compile unless N is a power of two."""
    tl.store(x + tl.arange(0, N), 0)

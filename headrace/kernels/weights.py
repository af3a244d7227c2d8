"""Logits as ordered integers, and their weights in fixed point: what every sampling kernel shares.

A weight is round(2^40 exp((z - peak) / T)) as an int64, with z <= peak. Sums of integers do not
depend on their order, so a row's draw is the same bits however the work is cut. 2^22 weights fit.
A token 2^-41 times as likely as the peak, or less, weighs nothing: it is never drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import draw_params

# Small int32 columns: their alignment is not a reason to compile a kernel anew.
COLUMNS = (
    *("table", "positions", "draw_tokens", "draw_rows", "last", "tokens"),
    *("sources", "edits", "arena", "masks", "mask_slots"),
)

NEG_INF = tl.constexpr(float("-inf"))
ONE = tl.constexpr(1 << 40)  # the peak's weight
FEW = tl.constexpr(draw_params.FEW)


@triton.jit
def is_few(mine):
    """Whether `few_kernel` draws this row of the table: it samples, and its top_k is small."""
    top_k = tl.load(mine + 1)
    return (tl.load(mine).to(tl.float32, bitcast=True) > 0.0) & (top_k > 0) & (top_k <= FEW)


@triton.jit
def slope(temperature):
    """log2(e) / T, float32: the factor of `weight`; temperature float32 > 0."""
    return (1.4426950408889634 / temperature.to(tl.float64)).to(tl.float32)


@triton.jit
def weight(z, peak, scale):
    """int64 weights of float32 logits; peak finite, z <= peak, -inf allowed."""
    finite = z > NEG_INF
    x = tl.exp2(tl.where(finite, z - peak, 0.0) * scale)
    return tl.where(finite, x * 1099511627776.0 + 0.5, 0.0).to(tl.int64)


@triton.jit
def ordered(z):
    """int32 in the order of float32: equal floats (both zeros too) get equal keys; no NaN."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unordered(key):
    """The float32 of a key of `ordered`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)

"""top_n_sigma: tokens n standard deviations or more below the largest logit are dropped.

Plain reference: `sampling.truncation.TopNSigma`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.edit import double
from headrace.kernels.edit_params import IS_FEW, SIGMA, USES, WIDTH
from headrace.kernels.weights import COLUMNS, NEG_INF, ordered, unordered


@triton.jit
def wide_sigma(mine):
    """top_n_sigma of a row; 0 where it has none, and where `few_kernel` cuts."""
    return tl.where((tl.load(mine + USES) & IS_FEW) == 0, double(mine + SIGMA), 0.0)


@triton.jit
def floor_of(count, total, squares, peak, n):
    """The least float32 logit that stays, of finite logits' count, sum and sum of squares."""
    count = tl.maximum(count, 1.0)
    mean = total / count
    least = peak.to(tl.float64) - n * tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    least = tl.maximum(least, -3.4028234663852886e38)
    nearest = least.to(tl.float32)
    # The next float32 where it was rounded down: a comparison of floats is exact.
    above = unordered(ordered(nearest) + 1)
    return tl.where(nearest.to(tl.float64) < least, above, nearest)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def moments_kernel(
    wide,
    edits,
    draw_rows,
    moments,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). moments [draws, chunks, 4] float64 of finite logits: how many, their
    sum, sum of squares, largest. Only rows that `wide_sigma` names.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    n = wide_sigma(edits + tl.load(draw_rows + draw) * WIDTH)
    if n > 0.0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        row = wide + draw.to(tl.int64) * VOCAB
        z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF)
        finite = (z > NEG_INF) & (z < float("inf"))
        known = tl.where(finite, z, 0.0).to(tl.float64)
        mine = moments + (draw * CHUNKS + chunk) * 4
        tl.store(mine, tl.sum(finite.to(tl.int32), 0).to(tl.float64))
        tl.store(mine + 1, tl.sum(known, 0))
        tl.store(mine + 2, tl.sum(known * known, 0))
        tl.store(mine + 3, tl.max(tl.where(finite, z, NEG_INF), 0).to(tl.float64))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def sigma_kernel(
    wide,
    edits,
    draw_rows,
    moments,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). -inf in `wide` for what lies below; NaN stays."""
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    n = wide_sigma(edits + tl.load(draw_rows + draw) * WIDTH)
    if n > 0.0:
        each = tl.arange(0, CHUNKS_PADDED)
        real = each < CHUNKS
        mine = moments + (draw * CHUNKS + each) * 4
        count = tl.sum(tl.load(mine, mask=real, other=0.0), 0)
        total = tl.sum(tl.load(mine + 1, mask=real, other=0.0), 0)
        squares = tl.sum(tl.load(mine + 2, mask=real, other=0.0), 0)
        peak = tl.max(tl.load(mine + 3, mask=real, other=NEG_INF), 0)
        nearest = floor_of(count, total, squares, peak, n)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        row = wide + draw.to(tl.int64) * VOCAB
        z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF)
        tl.store(row + ids, NEG_INF, mask=(ids < VOCAB) & (z < nearest))

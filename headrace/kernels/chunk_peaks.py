"""First pass over logits: of every chunk of every row its largest logit, where, and its weight."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.weights import COLUMNS, NEG_INF, slope, weight


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def chunk_peaks_kernel(
    logits,
    sources,
    table,
    draw_rows,
    peaks,
    firsts,
    masses,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    WEIGH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). Writes, each [draws, chunks]:

    peaks float32   the largest logit; +inf where the chunk holds NaN or +inf
    firsts int32    its first id
    masses int64    sum of weights against the chunk's own peak; only if WEIGH, rows that sample
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    at = draw * CHUNKS + chunk
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
    z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF).to(tl.float32)
    z = tl.where(z == z, z, float("inf"))  # NaN is not equal to itself
    peak = tl.max(z, 0)
    tl.store(peaks + at, peak)
    tl.store(firsts + at, tl.min(tl.where(z == peak, ids, VOCAB - 1), 0))
    if WEIGH:
        temperature = tl.load(table + tl.load(draw_rows + draw) * 8).to(tl.float32, bitcast=True)
        mass = tl.zeros((), tl.int64)
        if (temperature > 0.0) & (peak > NEG_INF) & (peak < float("inf")):
            mass = tl.sum(weight(z, peak, slope(temperature)), 0)
        tl.store(masses + at, mass)

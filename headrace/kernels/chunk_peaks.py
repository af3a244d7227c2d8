"""First pass over logits: of every chunk of every row its largest logit, where, and its weight;
and what `few_kernel` starts from.

Plain reference: `sampling.pipeline`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.edit import double
from headrace.kernels.edit_params import SIGMA
from headrace.kernels.edit_params import WIDTH as EDIT_WIDTH
from headrace.kernels.weights import COLUMNS, NEG_INF, is_few, ordered, slope, weight


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def chunk_peaks_kernel(
    logits,
    sources,
    table,
    draw_rows,
    peaks,
    firsts,
    masses,
    tops,
    edits,
    moments,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGH: tl.constexpr,
    LIST: tl.constexpr,
    EDITED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). Writes, each [draws, chunks]:

    peaks float32   the largest logit; +inf where the chunk holds NaN or +inf
    firsts int32    its first id
    masses int64    sum of weights against the chunk's own peak; only if WEIGH, rows that sample,
                    but for those of few tokens

    With LIST, of rows that sample: tops [draws, chunks, CHUNK // GROUP] int32, keys of the largest
    of each group of neighbours; with EDITED, of rows of few tokens that use top_n_sigma, moments
    [3, draws, chunks] float64: how many logits are finite, their sum, sum of squares.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    at = draw * CHUNKS + chunk
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
    z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF).to(tl.float32)
    z = tl.where(z == z, z, float("inf"))  # NaN is not equal to itself
    device_row = tl.load(draw_rows + draw)
    temperature = tl.load(table + device_row * 8).to(tl.float32, bitcast=True)
    few = draw < 0  # no
    if LIST:
        top = tl.max(tl.reshape(z, (CHUNK // GROUP, GROUP)), 1)
        peak = tl.max(top, 0)
        few = is_few(table + device_row * 8)
        if temperature > 0.0:
            group = at.to(tl.int64) * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            tl.store(tops + group, ordered(top))
            if EDITED:  # noqa: SIM102 - the compiler knows one of the two
                if few & (double(edits + device_row * EDIT_WIDTH + SIGMA) > 0.0):
                    finite = (z > NEG_INF) & (z < float("inf"))
                    known = tl.where(finite, z, 0.0).to(tl.float64)
                    stride = tl.num_programs(1) * CHUNKS
                    tl.store(moments + at, tl.sum(finite.to(tl.int32), 0).to(tl.float64))
                    tl.store(moments + stride + at, tl.sum(known, 0))
                    tl.store(moments + 2 * stride + at, tl.sum(known * known, 0))
    else:
        peak = tl.max(z, 0)
    tl.store(peaks + at, peak)
    tl.store(firsts + at, tl.min(tl.where(z == peak, ids, VOCAB - 1), 0))
    if WEIGH:
        mass = tl.zeros((), tl.int64)
        if (few == 0) & (temperature > 0.0) & (peak > NEG_INF) & (peak < float("inf")):
            mass = tl.sum(weight(z, peak, slope(temperature)), 0)
        tl.store(masses + at, mass)

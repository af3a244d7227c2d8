"""What typical_p starts from: tokens that earlier filters left, and the mean of their logits.

Plain reference: `sampling.pipeline`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.truncation import KEEP_ALL, kept_of
from headrace.kernels.typical import FARTHEST, PIVOTS, peak_of, wants_typical, widest
from headrace.kernels.weights import COLUMNS, NEG_INF, ordered, slope, weight


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def settle_kernel(
    wide,
    table,
    edits,
    draw_rows,
    peaks,
    equals,
    edges,
    rooms,
    counts,
    candidates,
    kept_mass,
    moments,
    spans,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). Where earlier filters dropped tokens, those that they left go to
    candidates [draws, ROOM] (bits of their logits, in no fixed order, counted in counts[0]); where
    ROOM may not hold them the others become -inf in `wide`, which is searched then.

    kept_mass [draws, chunks] int64: their weights. moments [3, draws, chunks] float64: sums of w,
    w y and w y y with y = peak - z. spans [draws, 3] int32 starts as (0, FARTHEST, -1).
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    at = draw * CHUNKS + chunk
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    device_row = tl.load(draw_rows + draw)
    wanted, temperature, _ = wants_typical(table, edits, device_row, peak)
    if wanted:
        if chunk == 0:
            tl.store(spans + draw * 3, 0)
            tl.store(spans + draw * 3 + 1, FARTHEST)
            tl.store(spans + draw * 3 + 2, -1)
        edge = tl.load(edges + draw)
        top_k = tl.load(table + device_row * 8 + 1)
        few = (edge > KEEP_ALL) & (top_k > 0) & (top_k <= ROOM)
        total = tl.zeros((), tl.int64)
        m0, m1, m2 = tl.zeros((), tl.float64), tl.zeros((), tl.float64), tl.zeros((), tl.float64)
        if (ordered(tl.load(peaks + at)) >= edge) | (few == 0):
            scale = slope(temperature)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            row = wide + draw.to(tl.int64) * VOCAB
            z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF)
            if edge > KEEP_ALL:
                each = tl.arange(0, CHUNKS_PADDED)
                before = tl.load(equals + draw * CHUNKS + each, mask=each < chunk, other=0)
                room = tl.load(rooms + draw) - tl.sum(before, 0)
                kept = kept_of(ordered(z), edge, room)
                tl.store(row + ids, NEG_INF, mask=(ids < VOCAB) & (kept == 0) & (few == 0))
                z = tl.where(kept, z, NEG_INF)
                weighs = weight(z, peak, scale) > 0
                number = tl.sum(weighs.to(tl.int32), 0)
                if number > 0:
                    rank = tl.cumsum(weighs.to(tl.int32), 0)
                    place = rank - 1 + tl.atomic_add(counts + draw * 2, number)
                    mine = candidates + draw.to(tl.int64) * ROOM
                    bits = z.to(tl.int32, bitcast=True)
                    tl.store(mine + place, bits, mask=weighs & (place < ROOM))
            total = tl.sum(weight(z, peak, scale), 0)
            y = tl.where(z > NEG_INF, peak - z, 0.0)
            w = tl.where(z > NEG_INF, tl.exp2(-y * scale), 0.0).to(tl.float64)
            # A logit too far away to weigh must not become 0 * inf.
            wy = tl.where(w > 0.0, w * y.to(tl.float64), 0.0)
            m0, m1 = tl.sum(w, 0), tl.sum(wy, 0)
            m2 = tl.sum(tl.where(w > 0.0, wy * y.to(tl.float64), 0.0), 0)
        tl.store(kept_mass + at, total)
        stride = tl.num_programs(1) * CHUNKS
        tl.store(moments + at, m0)
        tl.store(moments + stride + at, m1)
        tl.store(moments + 2 * stride + at, m2)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def centre_kernel(
    table,
    edits,
    draw_rows,
    peaks,
    moments,
    centres,
    pivots,
    bounds,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (draws,). centres [draws, 2] float32: the weighted mean of the logits and what it lacks.
    pivots [draws, PIVOTS] float32: the first distances to weigh, rising: around what it would be if
    surprises were normally distributed, and the bound of Chebyshev's inequality. bounds [draws, 2]
    float32: no distance that matters lies outside.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    wanted, temperature, p = wants_typical(table, edits, tl.load(draw_rows + draw), peak)
    if wanted:
        stride = tl.num_programs(0) * CHUNKS
        chunk = tl.arange(0, CHUNKS_PADDED)
        mine, real = moments + draw * CHUNKS + chunk, chunk < CHUNKS
        m0 = tl.sum(tl.load(mine, mask=real, other=0.0), 0)
        m1 = tl.sum(tl.load(mine + stride, mask=real, other=0.0), 0) / m0
        m2 = tl.sum(tl.load(mine + 2 * stride, mask=real, other=0.0), 0) / m0
        centre = peak.to(tl.float64) - m1
        high = centre.to(tl.float32)
        tl.store(centres + draw * 2, high)
        tl.store(centres + draw * 2 + 1, (centre - high.to(tl.float64)).to(tl.float32))
        tl.store(bounds + draw * 2, -1.0)
        tl.store(bounds + draw * 2 + 1, widest(centre, peak, temperature))
        sigma = tl.sqrt(tl.maximum(m2 - m1 * m1, 0.0))
        # Winitzki's approximation of the inverse error function.
        p = tl.minimum(tl.maximum(p, 1e-3), 1.0 - 1e-12)
        log = tl.log(1.0 - p * p)
        half = 4.330746750799873 + log / 2.0  # 2 / (0.147 pi)
        guess = sigma * tl.sqrt(2.0 * (tl.sqrt(half * half - log / 0.147) - half))
        i = tl.arange(0, PIVOTS)
        factor = tl.where(i == 0, 0.1, tl.where(i == 1, 0.45, tl.where(i == 2, 0.8, 0.95)))
        factor = tl.where(i == 4, 1.05, tl.where(i == 5, 1.25, tl.where(i == 6, 1.8, factor)))
        bound = 1.01 * sigma / tl.sqrt(1.0 - p)
        tried = tl.where(i == PIVOTS - 1, tl.maximum(bound, 1.8 * guess), factor * guess)
        tried = tl.minimum(tried, 3.4028234663852886e38).to(tl.float32)
        tl.store(pivots + draw * PIVOTS + i, tried)

"""typical_p: tokens whose surprise is nearest to the entropy stay, until they weigh enough.

The surprise of a token is x + log(total) with x = (peak - z) / T, the entropy the mean of that, so
a token's distance is |x - mean of x|. The distance where the kept ones end is searched on integers
(the bits of a float32 >= 0), as the edges in `truncation` are; weights and the sum behind the mean
are integers too, so a row's edge does not depend on how the work is cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.edit import double
from headrace.kernels.edit_params import TYPICAL, WIDTH
from headrace.kernels.truncation import BLOCK, PIVOTS, kept_of
from headrace.kernels.weights import COLUMNS, NEG_INF, ordered, slope, weight

FARTHEST = tl.constexpr(0x42800000)  # the bits of 64.0: what weighs anything is nearer


@triton.jit
def distance_of(z, peak, temperature, mean):
    """int32 in the order of |x - mean|."""
    finite = z > NEG_INF
    x = (peak - tl.where(finite, z, peak)).to(tl.float64) / temperature.to(tl.float64)
    far = tl.abs(x - mean).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(finite, tl.minimum(far, FARTHEST), FARTHEST)


@triton.jit
def near_of(z, ids, peak, temperature, mean_at, limit_at):
    """Which tokens typical_p keeps, of those that weigh anything."""
    distance = distance_of(z, peak, temperature, tl.load(mean_at))
    farthest, first_out = tl.load(limit_at), tl.load(limit_at + 1)
    near = (distance < farthest) | ((distance == farthest) & (ids < first_out))
    return near & (weight(z, peak, slope(temperature)) > 0)


@triton.jit
def peak_of(peaks, draw, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    chunk = tl.arange(0, CHUNKS_PADDED)
    return tl.max(tl.load(peaks + draw * CHUNKS + chunk, mask=chunk < CHUNKS, other=NEG_INF), 0)


@triton.jit
def wants_typical(table, edits, row, peak):
    """(whether the row's typical tokens are wanted, temperature, p)."""
    temperature = tl.load(table + row * 8).to(tl.float32, bitcast=True)
    p = double(edits + row * WIDTH + TYPICAL)
    wanted = (temperature > 0.0) & (p < 1.0) & (peak > NEG_INF) & (peak < float("inf"))
    return wanted, temperature, p


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
    kept_moment,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). Tokens that earlier filters left go to candidates [draws, ROOM] (bits
    of their logits, in no fixed order, counted in counts[0]). Where ROOM may not hold them the
    others become -inf in `wide`, which is searched then.

    kept_mass, kept_moment [draws, chunks] int64: their weights, and weights times x.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    at = draw * CHUNKS + chunk
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    device_row = tl.load(draw_rows + draw)
    wanted, temperature, _ = wants_typical(table, edits, device_row, peak)
    edge, room = tl.load(edges + draw), tl.load(rooms + draw)
    if wanted:
        top_k = tl.load(table + device_row * 8 + 1)
        few = (top_k > 0) & (top_k <= ROOM)
        total, moments = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        if (ordered(tl.load(peaks + at)) >= edge) | (few == 0):
            each = tl.arange(0, CHUNKS_PADDED)
            before = tl.load(equals + draw * CHUNKS + each, mask=each < chunk, other=0)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            row = wide + draw.to(tl.int64) * VOCAB
            z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF)
            kept = kept_of(ordered(z), edge, room - tl.sum(before, 0))
            tl.store(row + ids, NEG_INF, mask=(ids < VOCAB) & (kept == 0) & (few == 0))
            mass = tl.where(kept, weight(z, peak, slope(temperature)), 0)
            weighs = mass > 0
            x = (peak - tl.where(weighs, z, peak)).to(tl.float64) / temperature.to(tl.float64)
            total = tl.sum(mass, 0)
            moments = tl.sum((mass.to(tl.float64) * x + 0.5).to(tl.int64), 0)
            rank = tl.cumsum(weighs.to(tl.int32), 0)
            place = rank - 1 + tl.atomic_add(counts + draw * 2, tl.sum(weighs.to(tl.int32), 0))
            mine = candidates + draw.to(tl.int64) * ROOM
            tl.store(mine + place, z.to(tl.int32, bitcast=True), mask=weighs & (place < ROOM))
        tl.store(kept_mass + at, total)
        tl.store(kept_moment + at, moments)


@triton.jit
def _measure(source, begin, end, pivots, peak, scale, temperature, mean):
    """What source[begin:end] (logits) weighs within each distance: int64 [pivots]."""
    found = tl.zeros((pivots.shape[0], BLOCK), tl.int64)
    start = begin
    while start < end:
        for _ in tl.static_range(2):  # loads in flight together
            at = start + tl.arange(0, BLOCK)
            z = tl.load(source + at, mask=at < end, other=NEG_INF)
            value = weight(z, peak, scale)
            near = distance_of(z, peak, temperature, mean)[None, :] <= pivots[:, None]
            found += tl.where(near, value[None, :], 0)
            start += BLOCK
    return tl.sum(found, 1)


@triton.jit
def _farthest(source, n, wanted, peak, scale, temperature, mean):
    """The least distance within which source[:n] weighs `wanted` or more."""
    low, high = tl.zeros((), tl.int32), tl.full((), FARTHEST, tl.int32)
    step = tl.arange(0, PIVOTS)
    while low < high:
        width = high - low
        pivots = low + (width.to(tl.int64) * step // PIVOTS).to(tl.int32)  # low first, below high
        found = _measure(source, 0, n, pivots, peak, scale, temperature, mean)
        short = tl.sum((found < wanted).to(tl.int32), 0)  # the lowest pivots
        if short < PIVOTS:
            high = low + (width.to(tl.int64) * short // PIVOTS).to(tl.int32)
        if short > 0:
            low += (width.to(tl.int64) * (short - 1) // PIVOTS).to(tl.int32) + 1
    return low


@triton.jit
def _edge(source, n, wanted, peak, scale, temperature, mean):
    """(that distance, what is nearer, what is just there)."""
    distance = _farthest(source, n, wanted, peak, scale, temperature, mean)
    one = distance - 1 + tl.zeros((1,), tl.int32)
    below = tl.sum(_measure(source, 0, n, one, peak, scale, temperature, mean), 0)
    upto = tl.sum(_measure(source, 0, n, one + 1, peak, scale, temperature, mean), 0)
    return distance, below, upto - below


@triton.jit
def _on(source, begin, end, distance, peak, scale, temperature, mean):
    """What lies exactly at a distance: weight, int64."""
    one = distance + tl.zeros((1,), tl.int32)
    upto = _measure(source, begin, end, one, peak, scale, temperature, mean)
    below = _measure(source, begin, end, one - 1, peak, scale, temperature, mean)
    return tl.sum(upto - below, 0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def typical_kernel(
    wide,
    table,
    edits,
    draw_rows,
    peaks,
    counts,
    candidates,
    kept_mass,
    kept_moment,
    means,
    limits,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (draws,). means [draws] float64; limits [draws, 2] int32: the distance of the last token
    that stays, and the id from which on tokens at just that distance go.

    Those that earlier filters dropped may still be in `wide`: of equal logits the ones with the
    highest ids, so they come behind the ones that stay.

    candidates [draws, ROOM] float32.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    wanted, temperature, p = wants_typical(table, edits, tl.load(draw_rows + draw), peak)
    if wanted:
        each = tl.arange(0, CHUNKS_PADDED)
        at = draw * CHUNKS + each
        total = tl.sum(tl.load(kept_mass + at, mask=each < CHUNKS, other=0), 0)
        moment = tl.sum(tl.load(kept_moment + at, mask=each < CHUNKS, other=0), 0)
        mean = moment.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)
        least = tl.ceil(p * total.to(tl.float64)).to(tl.int64)
        least = tl.minimum(tl.maximum(least, 1), total)
        scale = slope(temperature)
        row = wide + draw.to(tl.int64) * VOCAB
        n = tl.load(counts + draw * 2)
        distance, below, on = 0, total * 0, total * 0
        if n <= ROOM:
            mine = candidates + draw.to(tl.int64) * ROOM
            distance, below, on = _edge(mine, n, least, peak, scale, temperature, mean)
        else:
            distance, below, on = _edge(row, VOCAB, least, peak, scale, temperature, mean)
        # Of several at that distance the lowest ids stay: the first id that is enough, halving.
        low, high = tl.zeros((), tl.int32), tl.full((), VOCAB, tl.int32)
        left = least - below
        if left < on:
            while high - low > 1:
                middle = (low + high) // 2
                here = _on(row, low, middle, distance, peak, scale, temperature, mean)
                if here >= left:
                    high = middle
                else:
                    low = middle
                    left -= here
        tl.store(means + draw, mean)
        tl.store(limits + draw * 2, distance)
        tl.store(limits + draw * 2 + 1, high)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def near_kernel(
    wide,
    table,
    edits,
    draw_rows,
    peaks,
    equals,
    edges,
    rooms,
    means,
    limits,
    new_peaks,
    masses,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). masses becomes the weight of the tokens that stay after all filters,
    new_peaks [draws, chunks] their largest logit; of rows without typical_p the peaks as they were.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    at = draw * CHUNKS + chunk
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    wanted, temperature, _ = wants_typical(table, edits, tl.load(draw_rows + draw), peak)
    own_peak, edge = tl.load(peaks + at), tl.load(edges + draw)
    if wanted:
        mass = tl.zeros((), tl.int64)
        if ordered(own_peak) >= edge:
            each = tl.arange(0, CHUNKS_PADDED)
            before = tl.load(equals + draw * CHUNKS + each, mask=each < chunk, other=0)
            room = tl.load(rooms + draw) - tl.sum(before, 0)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            row = wide + draw.to(tl.int64) * VOCAB
            z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF)
            near = near_of(z, ids, peak, temperature, means + draw, limits + draw * 2)
            z = tl.where(near & kept_of(ordered(z), edge, room), z, NEG_INF)
            own_peak = tl.max(z, 0)
            if own_peak > NEG_INF:
                mass = tl.sum(weight(z, own_peak, slope(temperature)), 0)
        tl.store(masses + at, mass)
    tl.store(new_peaks + at, own_peak)

"""typical_p: tokens whose surprise is nearest to the entropy stay, until they weigh enough.

The surprise of a token is (peak - z) / T + log(total) and the entropy the mean of that, so a
token's place in the order is its distance |z - centre| from the weighted mean of the logits. The
largest distance that stays is searched among integers, the bits of a float32 >= 0, and what lies
within it is an integer sum of weights: a row's tokens do not depend on how the work is cut.

Every read of a whole row is spread over its chunks. Two passes weigh (in float32, with the error
accounted for) what lies within eight distances each, and a program a row draws the bounds closer
after each; a third gathers the tokens of the bracket
that is left, and one program a row finishes among those. Rows that earlier filters left few tokens
of have them gathered at once. Should a bracket hold more than there is room for, of more than one
distance, one program searches the whole row: slower, and the same answer.

Plain reference: `sampling.truncation.TypicalP`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.edit import double
from headrace.kernels.edit_params import TYPICAL, WIDTH
from headrace.kernels.truncation import KEEP_ALL, kept_of, row_peak
from headrace.kernels.weights import COLUMNS, NEG_INF, ONE, is_few, ordered, slope, weight

PIVOTS = tl.constexpr(8)  # distances weighed in one pass
BLOCK = tl.constexpr(1024)  # candidates or logits that the last search handles at a time
FARTHEST = tl.constexpr(0x7F7FFFFF)  # the bits of the largest float32
SLACK = tl.constexpr(4e-6)  # of a row's weight: more than float32 sums of chunks are off
LIGHTEST = tl.constexpr(28.5)  # (peak - z) / T of whatever weighs anything is less: 41 log 2


@triton.jit
def distance_of(z, centre_at):
    """`distance_from` the centre that stands there."""
    return distance_from(z, tl.load(centre_at), tl.load(centre_at + 1))


@triton.jit
def distance_from(z, centre, rest):
    """float32 |z - centre|, the centre being the sum of two floats; of -inf the largest."""
    far = tl.abs((z - centre) - rest)
    return tl.where(z > NEG_INF, tl.minimum(far, 3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def key_of(distance):
    """int32 in the order of distances."""
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def peak_of(peaks, draw, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """The row's largest logit."""
    _, peak = row_peak(peaks, draw, CHUNKS, CHUNKS_PADDED)
    return peak


@triton.jit
def row_sum(parts, draw, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """Of parts [draws, CHUNKS] int64."""
    chunk = tl.arange(0, CHUNKS_PADDED)
    return tl.sum(tl.load(parts + draw * CHUNKS + chunk, mask=chunk < CHUNKS, other=0), 0)


@triton.jit
def wants_typical(table, edits, row, peak):
    """(whether the row's typical tokens are wanted here, temperature, p)."""
    temperature = tl.load(table + row * 8).to(tl.float32, bitcast=True)
    p = double(edits + row * WIDTH + TYPICAL)
    wanted = (temperature > 0.0) & (p < 1.0) & (peak > NEG_INF) & (peak < float("inf"))
    wanted = wanted & (is_few(table + row * 8) == 0)
    return wanted, temperature, p


@triton.jit
def typical_weights(z, peak, scale, edge, room, centre_at, limit, on_left):
    """int64 weights of a chunk's tokens, 0 of those that go; see `near_kernel`.

    room: tokens on the edge of earlier filters that stay in this chunk; on_left: what its tokens
    just at the limit must reach.
    """
    value = weight(tl.where(kept_of(ordered(z), edge, room), z, NEG_INF), peak, scale)
    keys = key_of(distance_of(z, centre_at))
    on = tl.where(keys == limit, value, 0)
    before = tl.cumsum(on, 0) - on
    return tl.where(keys < limit, value, 0) + tl.where(before < on_left, on, 0)


@triton.jit
def _is_listed(edge, count, top_k, ROOM: tl.constexpr):
    """Whether settle's list holds all tokens of the row that stay so far."""
    return (edge > KEEP_ALL) & (((top_k > 0) & (top_k <= ROOM)) | (count <= ROOM))


@triton.jit
def least_of(p, total):
    """The weight that typical tokens reach, of int64 `total` > 0."""
    return tl.minimum(tl.maximum(tl.ceil(p * total.to(tl.float64)).to(tl.int64), 1), total)


@triton.jit
def _narrowed(
    low, high, near, pivots, draw, wanted, slack, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr
):
    """(low, high]: where the distance must be, after what near [draws, chunks, PIVOTS] says."""
    chunk, i = tl.arange(0, CHUNKS_PADDED), tl.arange(0, PIVOTS)
    parts = near + (draw * CHUNKS + chunk[:, None]) * PIVOTS + i[None, :]
    part = tl.load(parts, mask=chunk[:, None] < CHUNKS, other=0.0)
    mass = tl.sum(part.to(tl.float64), 0)
    pivot = tl.load(pivots + draw * PIVOTS + i)
    low = tl.maximum(low, tl.max(tl.where(mass < wanted - slack, pivot, -1.0), 0))
    high = tl.minimum(high, tl.min(tl.where(mass > wanted + slack, pivot, high), 0))
    return low, high


@triton.jit
def widest(centre, peak, temperature):
    """No token that weighs anything is farther from the float64 centre than that, float32."""
    above = peak.to(tl.float64) - centre
    below = LIGHTEST * temperature.to(tl.float64) - above
    farthest = tl.maximum(above, below) * 1.0001 + 1e-30
    return tl.minimum(farthest, 3.4028234663852886e38).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def narrow_kernel(
    wide,
    table,
    edits,
    draw_rows,
    peaks,
    edges,
    counts,
    centres,
    pivots,
    near,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). near [draws, chunks, PIVOTS] float32: what lies within each pivot, the
    peak weighing 1.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    device_row = tl.load(draw_rows + draw)
    wanted, temperature, _ = wants_typical(table, edits, device_row, peak)
    top_k = tl.load(table + device_row * 8 + 1)
    listed = _is_listed(tl.load(edges + draw), tl.load(counts + draw * 2), top_k, ROOM)
    if wanted & (listed == 0):
        i = tl.arange(0, PIVOTS)
        pivot = tl.load(pivots + draw * PIVOTS + i)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        row = wide + draw.to(tl.int64) * VOCAB
        z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF)
        y = tl.where(z > NEG_INF, peak - z, 0.0)
        w = tl.where(z > NEG_INF, tl.exp2(-y * slope(temperature)), 0.0)
        distance = distance_of(z, centres + draw * 2)
        within = tl.where(distance[None, :] <= pivot[:, None], w[None, :], 0.0)
        tl.store(near + (draw * CHUNKS + chunk) * PIVOTS + i, tl.sum(within, 1))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def bounds_kernel(
    table,
    edits,
    draw_rows,
    peaks,
    edges,
    counts,
    kept_mass,
    pivots,
    near,
    bounds,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (draws,). bounds [draws, 2] float32, (low, high]: where the distance must be, closer
    now by what `near` says of the pivots, which become such that part what is left.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    device_row = tl.load(draw_rows + draw)
    wanted, _, p = wants_typical(table, edits, device_row, peak)
    top_k = tl.load(table + device_row * 8 + 1)
    listed = _is_listed(tl.load(edges + draw), tl.load(counts + draw * 2), top_k, ROOM)
    if wanted & (listed == 0):
        total = row_sum(kept_mass, draw, CHUNKS, CHUNKS_PADDED)
        target = least_of(p, total).to(tl.float64) / ONE
        low, high = _narrowed(
            tl.load(bounds + draw * 2), tl.load(bounds + draw * 2 + 1), near, pivots, draw,
            target, total.to(tl.float64) * (SLACK / ONE), CHUNKS, CHUNKS_PADDED,
        )  # fmt: skip
        tl.debug_barrier()  # all have read before any writes
        tl.store(bounds + draw * 2, low)
        tl.store(bounds + draw * 2 + 1, high)
        i = tl.arange(0, PIVOTS)
        least = tl.maximum(low, 0.0)
        pivot = least + (high - least) * ((i + 1).to(tl.float32) / (PIVOTS + 1))
        tl.store(pivots + draw * PIVOTS + i, pivot)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def collect_kernel(
    wide,
    table,
    edits,
    draw_rows,
    peaks,
    edges,
    counts,
    centres,
    bounds,
    candidates,
    spans,
    below_mass,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). Of the tokens within the bounds: their logits to candidates;
    spans: how many, and the least and largest key of their distances. below_mass [draws, chunks]
    int64: what is nearer than those.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    device_row = tl.load(draw_rows + draw)
    wanted, temperature, _ = wants_typical(table, edits, device_row, peak)
    top_k = tl.load(table + device_row * 8 + 1)
    listed = _is_listed(tl.load(edges + draw), tl.load(counts + draw * 2), top_k, ROOM)
    if wanted & (listed == 0):
        low, high = tl.load(bounds + draw * 2), tl.load(bounds + draw * 2 + 1)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        row = wide + draw.to(tl.int64) * VOCAB
        z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF)
        distance = distance_of(z, centres + draw * 2)
        value = weight(z, peak, slope(temperature))
        tl.store(below_mass + draw * CHUNKS + chunk, tl.sum(tl.where(distance <= low, value, 0), 0))
        inside = (distance > low) & (distance <= high) & (value > 0)
        number = tl.sum(inside.to(tl.int32), 0)
        if number > 0:
            keys = key_of(distance)
            tl.atomic_min(spans + draw * 3 + 1, tl.min(tl.where(inside, keys, FARTHEST), 0))
            tl.atomic_max(spans + draw * 3 + 2, tl.max(tl.where(inside, keys, -1), 0))
            place = tl.cumsum(inside.to(tl.int32), 0) - 1 + tl.atomic_add(spans + draw * 3, number)
            mine = candidates + draw.to(tl.int64) * ROOM
            bits = z.to(tl.int32, bitcast=True)
            tl.store(mine + place, bits, mask=inside & (place < ROOM))


@triton.jit
def _measure(source, n, pivots, peak, scale, centre_at, LOADS: tl.constexpr):
    """What source[:n] (logits) weighs within each distance, by key: int64 [pivots].

    LOADS: blocks that are in flight together.
    """
    found = tl.zeros((pivots.shape[0], BLOCK), tl.int64)
    for start in range(0, n, BLOCK * LOADS):
        for i in tl.static_range(LOADS):
            at = start + i * BLOCK + tl.arange(0, BLOCK)
            z = tl.load(source + at, mask=at < n, other=NEG_INF)
            value = weight(z, peak, scale)
            within = key_of(distance_of(z, centre_at))[None, :] <= pivots[:, None]
            found += tl.where(within, value[None, :], 0)
    return tl.sum(found, 1)


@triton.jit
def _search(
    source, n, low, high, base, least, peak, scale, centre_at, LOADS: tl.constexpr
):  # fmt: skip
    """(key, below, upto): the least key in [low, high] with base + measure(key) >= least (or high),
    what is nearer than that and what lies within it, int64.
    """
    step = tl.arange(0, PIVOTS)
    while low < high:
        width = (high - low).to(tl.int64)
        pivots = low + (width * step // PIVOTS).to(tl.int32)  # low first, below high
        found = base + _measure(source, n, pivots, peak, scale, centre_at, LOADS)
        short = tl.sum((found < least).to(tl.int32), 0)  # the lowest pivots
        if short < PIVOTS:
            high = low + (width * short // PIVOTS).to(tl.int32)
        if short > 0:
            low += (width * (short - 1) // PIVOTS).to(tl.int32) + 1
    pair = low - 1 + tl.arange(0, 2)
    found = base + _measure(source, n, pair, peak, scale, centre_at, LOADS)
    below = tl.sum(tl.where(tl.arange(0, 2) == 0, found, 0), 0)
    return low, below, tl.sum(found, 0) - below


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def typical_kernel(
    wide,
    table,
    edits,
    draw_rows,
    peaks,
    edges,
    counts,
    kept_mass,
    centres,
    candidates,
    spans,
    below_mass,
    limits,
    lefts,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (draws,). limits [draws] int32: the key of the last distance that stays. lefts [draws]
    int64: what tokens at just that distance, lowest ids first, must reach.

    candidates [draws, ROOM] float32.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    device_row = tl.load(draw_rows + draw)
    wanted, temperature, p = wants_typical(table, edits, device_row, peak)
    if wanted:
        centre_at = centres + draw * 2
        least = least_of(p, row_sum(kept_mass, draw, CHUNKS, CHUNKS_PADDED))
        scale = slope(temperature)
        top_k = tl.load(table + device_row * 8 + 1)
        n = tl.load(counts + draw * 2)
        low, high = tl.zeros((), tl.int32), tl.full((), FARTHEST, tl.int32)
        base = tl.zeros((), tl.int64)
        if _is_listed(tl.load(edges + draw), n, top_k, ROOM) == 0:
            n = tl.load(spans + draw * 3)
            low, high = tl.load(spans + draw * 3 + 1), tl.load(spans + draw * 3 + 2)
            base = row_sum(below_mass, draw, CHUNKS, CHUNKS_PADDED)
        key, below, fits = low, base, low == high
        if (n <= ROOM) & (low < high):
            mine = candidates + draw.to(tl.int64) * ROOM
            key, below, upto = _search(
                mine, n, low, high, base, least, peak, scale, centre_at, 1
            )  # fmt: skip
            fits = (below < least) & (upto >= least)
        if fits == 0:
            if n <= ROOM:  # nothing is known
                low, high = tl.zeros((), tl.int32), tl.full((), FARTHEST, tl.int32)
            key, below, _ = _search(
                wide + draw.to(tl.int64) * VOCAB, VOCAB, low, high, base * 0, least, peak, scale,
                centre_at, 4,
            )  # fmt: skip
        tl.store(limits + draw, key)
        tl.store(lefts + draw, least - below)


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
    centres,
    limits,
    masses,
    on_mass,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). Of rows with typical_p, against the row's peak, [draws, chunks] int64:
    masses become the weight of the tokens nearer than the limit, on_mass of those just there.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    at = draw * CHUNKS + chunk
    peak = peak_of(peaks, draw, CHUNKS, CHUNKS_PADDED)
    wanted, temperature, _ = wants_typical(table, edits, tl.load(draw_rows + draw), peak)
    if wanted:
        edge = tl.load(edges + draw)
        mass, on = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        if ordered(tl.load(peaks + at)) >= edge:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            row = wide + draw.to(tl.int64) * VOCAB
            z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF)
            if edge > KEEP_ALL:
                each = tl.arange(0, CHUNKS_PADDED)
                before = tl.load(equals + draw * CHUNKS + each, mask=each < chunk, other=0)
                room = tl.load(rooms + draw) - tl.sum(before, 0)
                z = tl.where(kept_of(ordered(z), edge, room), z, NEG_INF)
            value = weight(z, peak, slope(temperature))
            keys, limit = key_of(distance_of(z, centres + draw * 2)), tl.load(limits + draw)
            mass = tl.sum(tl.where(keys < limit, value, 0), 0)
            on = tl.sum(tl.where(keys == limit, value, 0), 0)
        tl.store(masses + at, mass)
        tl.store(on_mass + at, on)

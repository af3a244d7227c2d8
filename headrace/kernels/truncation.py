"""Top-k, top-p and min-p without a sort: each keeps the first tokens of a row in the order of
falling logits (lowest ids first among equals), so a row keeps those above an edge, and some on it.

The edge is searched on integers, the keys of `weights.ordered` without their constant low bits:
of top-k by counting tokens, of top-p by adding weights. A sample of the row says where it should
lie; tokens in that bracket are gathered, and the search reads those alone. Where the bracket
missed, or held more than the scratch has room for, the search reads the whole row: slower, and
the same edge, because counts and weights are integers.

Plain references: `TopK`, `TopP` and `MinP` of `sampling.truncation`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.weights import (
    COLUMNS,
    NEG_INF,
    ONE,
    ordered,
    slope,
    unordered,
    weight,
)

SIGMAS = tl.constexpr(3.5)  # of a bracket: about one row in 2000 is missed
SURE = tl.constexpr(8)  # so many of the sample are always inside: a peaked row's top is not in it
PIVOTS = tl.constexpr(4)  # keys tried in one pass: two bits a pass
BLOCK = tl.constexpr(2048)  # logits or candidates a pass handles at a time
KEEP_ALL = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def _short(z, LOW: tl.constexpr):
    """Keys without the LOW bits that are constant where logits came from 16-bit floats."""
    return ordered(z) >> LOW


@triton.jit
def _logit(short, LOW: tl.constexpr):
    """The logit of a short key, an int64 or int32."""
    short = short.to(tl.int32)
    return unordered((short << LOW) | tl.where(short < 0, (1 << LOW) - 1, 0))


@triton.jit
def row_peak(peaks, draw, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """(largest logit of each chunk, and of the row) of peaks [draws, CHUNKS]."""
    chunk = tl.arange(0, CHUNKS_PADDED)
    mask = chunk < CHUNKS
    chunk_peak = tl.load(peaks + draw * CHUNKS + chunk, mask=mask, other=NEG_INF)
    return chunk_peak, tl.max(chunk_peak, 0)


@triton.jit
def row_mass(masses, chunk_peak, peak, draw, temperature, CHUNKS: tl.constexpr, PADDED):
    """Sum of a row's weights against its peak, float64, in one fixed order."""
    chunk = tl.arange(0, PADDED)
    mass = tl.load(masses + draw * CHUNKS + chunk, mask=chunk < CHUNKS, other=0)
    below = tl.where(chunk_peak > NEG_INF, chunk_peak - peak, 0.0).to(tl.float64)
    return tl.sum(mass.to(tl.float64) * tl.exp(below / temperature.to(tl.float64)), 0)


@triton.jit
def limits_of(mine, VOCAB: tl.constexpr):
    """temperature float32, top_k (0 = off), top_p float64, min_p float32 of a row of the table."""
    temperature = tl.load(mine).to(tl.float32, bitcast=True)
    top_k = tl.load(mine + 1)
    top_k = tl.where(top_k < VOCAB, top_k, 0)
    top_p = tl.load(mine + 2).to(tl.float32, bitcast=True).to(tl.float64)
    top_p += tl.load(mine + 7).to(tl.float32, bitcast=True).to(tl.float64)
    return temperature, top_k, top_p, tl.load(mine + 3).to(tl.float32, bitcast=True)


@triton.jit
def min_p_key(peak, temperature, min_p):
    """The least key that min_p leaves.

    exp((z - peak) / T) >= min_p, without an exponential: z >= peak + T log(min_p).
    """
    least = peak.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
    least = tl.maximum(least, -3.4e38)
    nearest = least.to(tl.float32)
    return ordered(nearest) + (nearest.to(tl.float64) < least).to(tl.int32)


@triton.jit
def kept_of(keys, edge, room):
    """Which tokens of one chunk stay: those above the edge, and the first `room` on it."""
    equal = keys == edge
    rank = tl.cumsum(equal.to(tl.int32), 0)
    return (keys > edge) | (equal & (rank <= room))


@triton.jit
def _at_least(keys, count, low, high):
    """The largest key in [low, high] that so many of the keys reach, or low."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _tail_within(keys, w, sigmas, rest, low, high):
    """The largest key in [low, high] below which the keys weigh, `sigmas` standard deviations
    added, no more than `rest`, or low.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        below = tl.where(keys < middle.to(tl.int32), w, 0.0)
        within = tl.sum(below, 0) + sigmas * tl.sqrt(tl.sum(below * below, 0)) <= rest
        low = tl.where(within, middle, low)
        high = tl.where(within, high, middle - 1)
    return low.to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def bracket_kernel(
    logits,
    sources,
    table,
    draw_rows,
    peaks,
    masses,
    done,
    brackets,
    counts,
    above_mass,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    SAMPLE: tl.constexpr,
    LOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (draws,). brackets [draws, 2] int32: the edge should be in [low, high), in short keys;
    low = high where nothing is to be searched, as in rows that `few_kernel` has drawn (done).
    Zeroes counts [draws, 2] and above_mass [draws].
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    mine = table + tl.load(draw_rows + draw) * 8
    temperature, top_k, top_p, _ = limits_of(mine, VOCAB)
    chunk_peak, peak = row_peak(peaks, draw, CHUNKS, CHUNKS_PADDED)
    fine = (peak > NEG_INF) & (peak < float("inf"))
    low = tl.zeros((), tl.int32)
    high = tl.zeros((), tl.int32)
    if (temperature > 0.0) & fine & ((top_k > 0) | (top_p < 1.0)) & (tl.load(done + draw) == 0):
        i = tl.arange(0, SAMPLE)
        # Fractions of the golden ratio: evenly spread over the row, in no step with its order.
        golden = i.to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32)
        ids = tl.umulhi(golden, tl.full((SAMPLE,), VOCAB, tl.uint32))
        row = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
        z = tl.load(row + ids.to(tl.int32)).to(tl.float32)
        keys = _short(z, LOW)
        least, most = _short(tl.full((), float("-inf"), tl.float32), LOW), _short(peak, LOW) + 1
        low, high = least, most
        if top_k > 0:
            expected = top_k.to(tl.float32) * (SAMPLE / VOCAB)
            slack = tl.sqrt(expected) * SIGMAS + 4.0
            low = _at_least(keys, 1 + (expected + slack).to(tl.int32), least, most)
            if (expected >= slack + 1.0) & (top_p >= 1.0):  # top-p's edge is above that of top-k
                high = _at_least(keys, (expected - slack).to(tl.int32), least, most) + 1
        else:
            w = tl.exp2((_logit(keys, LOW) - peak) * slope(temperature))
            w = tl.where(keys > least, w, 0.0)
            total = row_mass(masses, chunk_peak, peak, draw, temperature, CHUNKS, CHUNKS_PADDED)
            rest = ((1.0 - top_p) * total / ONE).to(tl.float32) * (SAMPLE / VOCAB)
            # Below the edge lies at most `rest`, below the next larger key more than that.
            low = _tail_within(keys, w, SIGMAS, rest, least, most)
            low = tl.minimum(low, _at_least(keys, SURE, least, most))
            high = _tail_within(keys, w, -SIGMAS, rest, low, most) + 1
            if tl.sum((keys >= high).to(tl.int32), 0) < SURE:
                high = most
    tl.store(brackets + draw * 2, low)
    tl.store(brackets + draw * 2 + 1, high)
    tl.store(counts + draw * 2, 0)
    tl.store(counts + draw * 2 + 1, 0)
    tl.store(above_mass + draw, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def gather_kernel(
    logits,
    sources,
    table,
    draw_rows,
    peaks,
    brackets,
    counts,
    above_mass,
    candidates,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    LOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). Adds up counts[draw] = (tokens in the bracket, above it) and the
    weight above it; candidates [draws, ROOM] int32 get the short keys inside, in no fixed order.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    low, high = tl.load(brackets + draw * 2), tl.load(brackets + draw * 2 + 1)
    chunk_peak = _short(tl.load(peaks + draw * CHUNKS + chunk), LOW)
    if (low < high) & (chunk_peak >= low):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        row = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
        z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF).to(tl.float32)
        keys = _short(z, LOW)
        if chunk_peak >= high:
            temperature = tl.load(table + tl.load(draw_rows + draw) * 8)
            scale = slope(temperature.to(tl.float32, bitcast=True))
            _, peak = row_peak(peaks, draw, CHUNKS, CHUNKS_PADDED)
            above = keys >= high
            tl.atomic_add(counts + draw * 2 + 1, tl.sum(above.to(tl.int32), 0))
            mass = tl.sum(tl.where(above, weight(z, peak, scale), 0), 0)
            tl.atomic_add(above_mass + draw, mass)
        inside = (keys >= low) & (keys < high) & (ids < VOCAB)
        rank = tl.cumsum(inside.to(tl.int32), 0)
        start = tl.atomic_add(counts + draw * 2, tl.sum(inside.to(tl.int32), 0))
        place = start + rank - 1
        mine = candidates + draw.to(tl.int64) * ROOM
        tl.store(mine + place, keys, mask=inside & (place < ROOM))


@triton.jit
def _measure(source, n, pivots, peak, scale, WEIGH: tl.constexpr, KEYS: tl.constexpr, LOW):
    """How many of source[:n], or what they weigh, have short keys >= each pivot: int64 [pivots].

    The source holds short keys (KEYS) or logits.
    """
    found = tl.zeros((pivots.shape[0], BLOCK), tl.int64)
    start = tl.zeros((), tl.int32)
    while start < n:
        for _ in tl.static_range(2 if KEYS else 4):  # loads in flight together
            at = start + tl.arange(0, BLOCK)
            real = at < n
            if KEYS:
                keys = tl.load(source + at, mask=real, other=KEEP_ALL >> LOW)
                z = _logit(keys, LOW)
            else:
                z = tl.load(source + at, mask=real, other=NEG_INF).to(tl.float32)
                keys = _short(z, LOW)
            value = real.to(tl.int64)
            if WEIGH:
                value *= weight(z, peak, scale)
            above = keys.to(tl.int64)[None, :] >= pivots[:, None]
            found += tl.where(above, value[None, :], 0)
            start += BLOCK
    return tl.sum(found, 1)


@triton.jit
def _search(source, n, low, high, base, wanted, peak, scale, WEIGH: tl.constexpr, KEYS, LOW):
    """(t, over): the largest key t in [low, high], int64, with base + measure(>= t) >= wanted, and
    base + measure(> t).

    Taken as given: low is such a key, and nothing measured lies above high.
    """
    step = tl.arange(0, PIVOTS)
    over = base
    while low < high:
        width = high - low
        pivots = low + (width * (step + 1) + PIVOTS - 1) // PIVOTS
        found = base + _measure(source, n, pivots, peak, scale, WEIGH, KEYS, LOW)
        passed = tl.sum((found >= wanted).to(tl.int32), 0)  # the lowest pivots
        if passed < PIVOTS:
            high = low + (width * (passed + 1) + PIVOTS - 1) // PIVOTS - 1
            over = tl.sum(tl.where(step == passed, found, 0), 0)
        low = low + (width * passed + PIVOTS - 1) // PIVOTS
    return low, over


@triton.jit
def _one_measure(source, n, pivot, peak, scale, WEIGH: tl.constexpr, KEYS: tl.constexpr, LOW):
    pivots = pivot + tl.zeros((1,), tl.int64)
    return tl.sum(_measure(source, n, pivots, peak, scale, WEIGH, KEYS, LOW), 0)


@triton.jit
def _edge(
    source, n, low, high, base_count, base_mass, top_k, top_p, total, peak, scale,
    KEYS: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """(edge, room): the short key of the last token kept, and how many on it stay."""
    edge = low
    mass = total
    room = tl.full((), 2147483647, tl.int64)
    if top_k > 0:
        k = top_k.to(tl.int64)
        edge, before = _search(source, n, low, high, base_count, k, peak, scale, False, KEYS, LOW)
        room = k - before
        if top_p < 1.0:
            over = base_mass + _one_measure(source, n, edge + 1, peak, scale, True, KEYS, LOW)
            mass = (over + room * weight(_logit(edge, LOW), peak, scale)).to(tl.float64)
    if top_p < 1.0:
        wanted = tl.maximum(tl.ceil(top_p * mass).to(tl.int64), 1)
        edge, over = _search(source, n, edge, high, base_mass, wanted, peak, scale, True, KEYS, LOW)
        one = weight(_logit(edge, LOW), peak, scale)
        if one > 0:  # else no key reaches `wanted` (its sum was rounded up): all stay
            room = (wanted - over + one - 1) // one
    return edge, room


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def edge_kernel(
    logits,
    sources,
    table,
    draw_rows,
    peaks,
    masses,
    done,
    brackets,
    counts,
    above_mass,
    candidates,
    edges,
    rooms,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    ROOM: tl.constexpr,
    LOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (draws,). edges [draws] int32 in keys of `ordered`, rooms [draws] int32."""
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    mine = table + tl.load(draw_rows + draw) * 8
    temperature, top_k, top_p, min_p = limits_of(mine, VOCAB)
    chunk_peak, peak = row_peak(peaks, draw, CHUNKS, CHUNKS_PADDED)
    edge = tl.full((), KEEP_ALL, tl.int32)
    room = tl.full((), VOCAB, tl.int32)
    low, high = tl.load(brackets + draw * 2), tl.load(brackets + draw * 2 + 1)
    if low < high:
        scale = slope(temperature)
        total = row_mass(masses, chunk_peak, peak, draw, temperature, CHUNKS, CHUNKS_PADDED)
        inside = tl.load(counts + draw * 2)
        over, over_mass = tl.load(counts + draw * 2 + 1).to(tl.int64), tl.load(above_mass + draw)
        keys = candidates + draw.to(tl.int64) * ROOM
        held = inside <= ROOM
        if held:
            if top_k > 0:
                held = (over < top_k) & (top_k <= over + inside)
            else:
                wanted = tl.maximum(tl.ceil(top_p * total).to(tl.int64), 1)
                within = _one_measure(keys, inside, low.to(tl.int64), peak, scale, True, True, LOW)
                held = (over_mass < wanted) & (wanted <= over_mass + within)
        if held:
            short, room64 = _edge(
                keys, inside, low.to(tl.int64), high.to(tl.int64) - 1, over, over_mass,
                top_k, top_p, total, peak, scale, True, LOW,
            )  # fmt: skip
        else:
            lowest = tl.full((), KEEP_ALL, tl.int64) >> LOW
            row = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
            short, room64 = _edge(
                row, VOCAB, lowest, _short(peak, LOW).to(tl.int64),
                over * 0, over_mass * 0, top_k, top_p, total, peak, scale, False, LOW,
            )  # fmt: skip
        edge = ordered(_logit(short, LOW))
        room = tl.minimum(room64, VOCAB).to(tl.int32)
    cuts = (temperature > 0.0) & (min_p > 0.0) & (tl.load(done + draw) == 0)
    if cuts & (peak > NEG_INF) & (peak < float("inf")):
        floor = min_p_key(peak, temperature, min_p)
        if floor > edge:
            edge, room = floor, tl.full((), VOCAB, tl.int32)
    tl.store(edges + draw, edge)
    tl.store(rooms + draw, room)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def kept_kernel(
    logits,
    sources,
    table,
    draw_rows,
    peaks,
    masses,
    equals,
    edges,
    counts,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). Of rows that lose tokens: masses becomes the weight above the edge;
    equals [draws, chunks] int32 counts the tokens on it (0 in rows that keep all). counts[0] of
    every row is 0 again.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    at = draw * CHUNKS + chunk
    edge = tl.load(edges + draw)
    equal = tl.zeros((), tl.int32)
    if edge > KEEP_ALL:
        peak = tl.load(peaks + at)
        mass = tl.zeros((), tl.int64)
        if ordered(peak) >= edge:
            temperature = tl.load(table + tl.load(draw_rows + draw) * 8)
            scale = slope(temperature.to(tl.float32, bitcast=True))
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            row = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
            z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF).to(tl.float32)
            keys = ordered(z)
            mass = tl.sum(tl.where(keys > edge, weight(z, peak, scale), 0), 0)
            equal = tl.sum((keys == edge).to(tl.int32), 0)
        tl.store(masses + at, mass)
    tl.store(equals + at, equal)
    tl.store(counts + draw * 2, 0, mask=chunk == 0)

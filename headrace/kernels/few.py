"""Rows whose top_k is small: everything from the filters to the token, in one program a row.

The first pass names the largest of each group of neighbours (`chunk_peaks_kernel`). At least k
tokens are as large as the k-th largest of those, so only the groups that reach it are read again,
and only their tokens that reach it are candidates: hardly more than k where large logits lie
anywhere. They stand in the order of their ids, as do those that stay, so ties and the draw itself
are cumulative sums. Should more be left than one program holds, a search for a narrower limit
goes over the candidates, or over the row where there is no room for them: slower, the same tokens.

Searches go over integers, the keys of `weights.ordered` or the bits of distances, and sums are of
integer weights. A row comes here by its own parameters alone, whatever the call.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.edit import double
from headrace.kernels.edit_params import SIGMA, TYPICAL
from headrace.kernels.edit_params import WIDTH as EDIT_WIDTH
from headrace.kernels.philox import uniform
from headrace.kernels.sigma import floor_of
from headrace.kernels.truncation import KEEP_ALL
from headrace.kernels.typical import FARTHEST, distance_from, key_of, least_of
from headrace.kernels.weights import COLUMNS, NEG_INF, is_few, ordered, slope, unordered, weight

TILE = tl.constexpr(4096)  # logits or candidates that are looked at together
TILE_GROUPS = tl.constexpr(64)


@triton.jit
def _count(keys, pivot):
    return tl.sum((keys >= pivot).to(tl.int32), 0)


@triton.jit
def _largest(keys, values, low, high, wanted):
    """The largest key t in [low, high] whose sum(values[keys >= t]) >= wanted; low is taken as one.

    values int64.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.sum(tl.where(keys >= middle.to(tl.int32), values, 0), 0) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _least(keys, values, high, wanted):
    """The least key t in [0, high] whose sum(values[keys <= t]) >= wanted; high is taken as one."""
    low = tl.zeros((), tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(keys <= middle, values, 0), 0) >= wanted
        low = tl.where(reached, low, middle + 1)
        high = tl.where(reached, middle, high)
    return low


@triton.jit
def _loose(keys, high, k, most):
    """A key that k to `most` of the keys reach, or the largest that k do; not -inf."""
    low, high = tl.full((), KEEP_ALL + 1, tl.int64), high.to(tl.int64)
    found = _count(keys, low.to(tl.int32))
    while (low < high) & (found > most):
        middle = low + (high - low + 1) // 2
        reached = _count(keys, middle.to(tl.int32))
        found = tl.where(reached >= k, reached, found)
        low = tl.where(reached >= k, middle, low)
        high = tl.where(reached >= k, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _tile(source, ids, start, n, LOGITS: tl.constexpr):
    """(keys, ids) of a tile of candidates, or of a row of logits."""
    at = start + tl.arange(0, TILE)
    if LOGITS:
        z = tl.load(source + at, mask=at < n, other=NEG_INF).to(tl.float32)
        keys, each = ordered(z), at
    else:
        keys = tl.load(source + at, mask=at < n, other=KEEP_ALL)
        each = tl.load(ids + at, mask=at < n, other=0)
    return keys, each


@triton.jit
def _count_all(source, ids, n, pivot, LOGITS: tl.constexpr):
    found = tl.zeros((TILE,), tl.int32)
    for start in range(0, n, TILE):
        keys, _ = _tile(source, ids, start, n, LOGITS)
        found += (keys >= pivot).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _narrow(
    source, n, keys_at, ids_at, low, high, found, k, HELD: tl.constexpr, LOGITS: tl.constexpr
):
    """The k largest of `found` > HELD tokens that reach `low`, and up to HELD in all, to keys_at
    and ids_at, in order; how many. Of equal ones at the end the first. The source may be keys_at.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while (low < high) & (found > HELD):
        middle = low + (high - low + 1) // 2
        reached = _count_all(source, ids_at, n, middle.to(tl.int32), LOGITS)
        found = tl.where(reached >= k, reached, found)
        low = tl.where(reached >= k, middle, low)
        high = tl.where(reached >= k, high, middle - 1)
    edge = low.to(tl.int32)
    room = found
    if found > HELD:  # of one key
        room = k - _count_all(source, ids_at, n, edge + 1, LOGITS)
    kept, equals = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, n, TILE):
        keys, ids = _tile(source, ids_at, start, n, LOGITS)
        equal = keys == edge
        stays = (keys > edge) | (equal & (equals + tl.cumsum(equal.to(tl.int32), 0) <= room))
        place = kept + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.debug_barrier()  # all have read before any writes
        tl.store(keys_at + place, keys, mask=stays)
        tl.store(ids_at + place, ids, mask=stays)
        kept += tl.sum(stays.to(tl.int32), 0)
        equals += tl.sum(equal.to(tl.int32), 0)
        tl.debug_barrier()
    return kept


@triton.jit
def _candidates(
    row, tops, keys_at, ids_at, peak, k,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr,
    HELD: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """(limit, n): n <= HELD tokens at or above a limit, the k largest among them, in order."""
    group = tl.arange(0, GROUPS_PADDED)
    top = tl.load(tops + group, mask=group < GROUPS, other=KEEP_ALL)
    highest = ordered(peak)
    limit = _loose(top, highest, k, k + k // 4 + 8)
    reaches = top >= limit
    groups = tl.sum(reaches.to(tl.int32), 0)
    place = tl.cumsum(reaches.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(tops + place, group, mask=reaches)  # what was read becomes the list of them
    tl.debug_barrier()
    n = tl.zeros((), tl.int32)
    for start in range(0, groups, TILE_GROUPS):
        i = start + tl.arange(0, TILE_GROUPS)
        which = tl.load(tops + i, mask=i < groups, other=GROUPS)
        ids = which[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        ids = tl.reshape(ids, (TILE_GROUPS * GROUP,))
        keys = ordered(tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF).to(tl.float32))
        inside = keys >= limit
        place = n + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(keys_at + place, keys, mask=inside & (place < ROOM))
        tl.store(ids_at + place, ids, mask=inside & (place < ROOM))
        n += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()
    if n > HELD:
        if n > ROOM:
            n = _narrow(row, VOCAB, keys_at, ids_at, limit, highest, n, k, HELD, True)
        else:
            n = _narrow(keys_at, n, keys_at, ids_at, limit, highest, n, k, HELD, False)
    return limit, n


@triton.jit
def _typical(weights, z, peak, scale, p):
    """Weights of tokens that stay so far -> of those that are typical, the rest 0."""
    total = tl.sum(weights, 0)
    stays = z > NEG_INF
    y = tl.where(stays, peak - z, 0.0)
    w = tl.where(stays, tl.exp2(-y * scale), 0.0).to(tl.float64)
    wy = tl.where(w > 0.0, w * y.to(tl.float64), 0.0)
    centre = peak.to(tl.float64) - tl.sum(wy, 0) / tl.sum(w, 0)
    high = centre.to(tl.float32)
    keys = key_of(distance_from(z, high, (centre - high.to(tl.float64)).to(tl.float32)))
    least = least_of(p, total)
    limit = _least(keys, weights, tl.full((), FARTHEST, tl.int32), least)
    nearer = tl.where(keys < limit, weights, 0)
    on = tl.where(keys == limit, weights, 0)
    before = tl.sum(nearer, 0) + tl.cumsum(on, 0) - on
    return nearer + tl.where(before < least, on, 0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def few_kernel(
    logits,
    sources,
    table,
    edits,
    positions,
    draw_tokens,
    draw_rows,
    last,
    tokens,
    peaks,
    tops,
    moments,
    few_keys,
    few_ids,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
    ROOM: tl.constexpr,
    EDITED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (draws,). A token for rows of few tokens, or -1 or -2 as `draw_kernel` has it; others
    are left alone. tops [draws, GROUPS] int32 is written over; few_keys, few_ids [draws, ROOM].
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    device_row = tl.load(draw_rows + draw)
    mine = table + device_row * 8
    if is_few(mine):
        chunk = tl.arange(0, CHUNKS_PADDED)
        real = chunk < CHUNKS
        peak = tl.max(tl.load(peaks + draw * CHUNKS + chunk, mask=real, other=NEG_INF), 0)
        fine = (peak > NEG_INF) & (peak < float("inf"))
        token = tl.where(peak > NEG_INF, -1, -2)
        if fine:
            temperature = tl.load(mine).to(tl.float32, bitcast=True)
            k = tl.minimum(tl.load(mine + 1), VOCAB)
            top_p = tl.load(mine + 2).to(tl.float32, bitcast=True).to(tl.float64)
            top_p += tl.load(mine + 7).to(tl.float32, bitcast=True).to(tl.float64)
            min_p = tl.load(mine + 3).to(tl.float32, bitcast=True)
            scale = slope(temperature)
            row = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
            long_draw = draw.to(tl.int64)
            limit, n = _candidates(
                row, tops + long_draw * GROUPS,
                few_keys + long_draw * ROOM, few_ids + long_draw * ROOM, peak, k,
                VOCAB, GROUPS, GROUPS_PADDED, GROUP, HELD, ROOM,
            )  # fmt: skip
            i = tl.arange(0, HELD)
            keys = tl.load(few_keys + long_draw * ROOM + i, mask=i < n, other=KEEP_ALL)
            ids = tl.load(few_ids + long_draw * ROOM + i, mask=i < n, other=VOCAB)
            highest = ordered(peak)
            # top_n_sigma, then top_k.
            ones = (keys > KEEP_ALL).to(tl.int64)
            edge, room = limit, n
            if n > k:
                edge = _largest(keys, ones, limit, highest, k)
                room = k - _count(keys, edge + 1)
            if EDITED:
                sigmas = double(edits + device_row * EDIT_WIDTH + SIGMA)
                if sigmas > 0.0:
                    at, stride = moments + draw * CHUNKS + chunk, tl.num_programs(0) * CHUNKS
                    count = tl.sum(tl.load(at, mask=real, other=0.0), 0)
                    total = tl.sum(tl.load(at + stride, mask=real, other=0.0), 0)
                    squares = tl.sum(tl.load(at + 2 * stride, mask=real, other=0.0), 0)
                    floor = ordered(floor_of(count, total, squares, peak, sigmas))
                    room = tl.where(floor > edge, n, room)
                    edge = tl.maximum(floor, edge)
            z = unordered(keys)
            equal = (keys == edge).to(tl.int32)
            stays = (keys > edge) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
            weights = tl.where(stays, weight(z, peak, scale), 0)
            if top_p < 1.0:
                wanted = tl.ceil(top_p * tl.sum(weights, 0).to(tl.float64)).to(tl.int64)
                wanted = tl.maximum(wanted, 1)
                edge = _largest(keys, weights, edge, highest, wanted)
                over = tl.sum(tl.where(keys > edge, weights, 0), 0)
                on = tl.where(keys == edge, weights, 0)
                before = over + tl.cumsum(on, 0) - on
                stays = stays & ((keys > edge) | ((keys == edge) & (before < wanted)))
            if min_p > 0.0:
                # exp((z - peak) / T) >= min_p, without an exponential: z >= peak + T log(min_p).
                least = peak.to(tl.float64)
                least += temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
                stays = stays & (z.to(tl.float64) >= tl.maximum(least, -3.4e38))
            weights = tl.where(stays, weights, 0)
            if EDITED:
                typical_p = double(edits + device_row * EDIT_WIDTH + TYPICAL)
                if typical_p < 1.0:
                    left = tl.where(stays, z, NEG_INF)
                    weights = _typical(weights, left, peak, scale, typical_p)
            total = tl.sum(weights, 0)
            place = tl.load(positions + tl.load(draw_tokens + draw)) + 1
            u = uniform(tl.load(mine + 4), tl.load(mine + 5), tl.load(mine + 6), place)
            local = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
            token = tl.min(tl.where(tl.cumsum(weights, 0) > local, ids, VOCAB - 1), 0)
        tl.store(tokens + draw, token)
        tl.store(last + device_row, tl.where(fine, token, 0))

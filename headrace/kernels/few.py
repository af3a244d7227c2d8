"""Rows that keep few tokens: everything from the filters to the token, in one program a row.

That is rows with a small top_k; and it is tried with rows of top_p or min_p alone, and goes through
where they end among the FEW largest, which hold most of the weight when a model is sure.

Its candidates (`candidates`) stand in the order of their ids, as do those that stay, so ties and
the draw itself are cumulative sums.

Searches go over integers, the keys of `weights.ordered` or the bits of distances, and sums are of
integer weights. A row comes here by its own parameters
and logits alone, whatever the call.

Plain reference: `sampling.pipeline`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.candidates import candidates_of, count_reaching
from headrace.kernels.edit import double
from headrace.kernels.edit_params import SIGMA, TYPICAL
from headrace.kernels.edit_params import WIDTH as EDIT_WIDTH
from headrace.kernels.philox import uniform
from headrace.kernels.sigma import floor_of
from headrace.kernels.truncation import KEEP_ALL, limits_of, min_p_key, row_mass, row_peak
from headrace.kernels.typical import FARTHEST, distance_from, key_of, least_of
from headrace.kernels.weights import (
    COLUMNS,
    FEW,
    NEG_INF,
    ONE,
    is_few,
    ordered,
    slope,
    unordered,
    weight,
)


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
    masses,
    tops,
    moments,
    few_keys,
    few_ids,
    done,
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
    """Grid (draws,). done [draws] int32: 1 for rows of few tokens; they get a token, or -1 or -2 as
    `draw_kernel` has it. tops [draws, GROUPS] int32 is written over; few_keys, few_ids [draws,
    ROOM].
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    device_row = tl.load(draw_rows + draw)
    mine = table + device_row * 8
    few = is_few(mine)
    settled = few
    temperature, top_k, top_p, min_p = limits_of(mine, VOCAB)
    tried = (temperature > 0.0) & (top_k == 0) & ((top_p < 1.0) | (min_p > 0.0))
    if EDITED:
        tried = tried & (double(edits + device_row * EDIT_WIDTH + TYPICAL) >= 1.0)
    if few | tried:
        chunk_peak, peak = row_peak(peaks, draw, CHUNKS, CHUNKS_PADDED)
        fine = (peak > NEG_INF) & (peak < float("inf"))
        token = tl.where(peak > NEG_INF, -1, -2)
        k = tl.minimum(tl.where(few, tl.load(mine + 1), FEW), VOCAB)
        wanted = tl.zeros((), tl.int64)
        if fine & (few == 0):
            total = row_mass(masses, chunk_peak, peak, draw, temperature, CHUNKS, CHUNKS_PADDED)
            wanted = tl.maximum(tl.ceil(top_p * total).to(tl.int64), 1)
        if fine & ((min_p > 0.0) | (wanted <= k.to(tl.int64) * ONE)):
            scale = slope(temperature)
            row = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
            long_draw = draw.to(tl.int64)
            highest = ordered(peak)
            limit, n = candidates_of(
                row, tops + long_draw * GROUPS,
                few_keys + long_draw * ROOM, few_ids + long_draw * ROOM,
                tl.full((), KEEP_ALL + 1, tl.int32), highest, k,
                VOCAB, GROUPS, GROUPS_PADDED, GROUP, HELD, ROOM,
            )  # fmt: skip
            i = tl.arange(0, HELD)
            keys = tl.load(few_keys + long_draw * ROOM + i, mask=i < n, other=KEEP_ALL)
            ids = tl.load(few_ids + long_draw * ROOM + i, mask=i < n, other=VOCAB)
            # top_n_sigma, then top_k.
            settled = few | ((limit == KEEP_ALL + 1) & (n <= k))  # or none is left out
            edge, room = limit, n
            if n > k:
                edge = _largest(keys, (keys > KEEP_ALL).to(tl.int64), limit, highest, k)
                room = k - count_reaching(keys, edge + 1)
            last_key = edge
            if EDITED:
                sigmas = double(edits + device_row * EDIT_WIDTH + SIGMA)
                if few & (sigmas > 0.0):
                    chunk = tl.arange(0, CHUNKS_PADDED)
                    real = chunk < CHUNKS
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
                held = tl.sum(weights, 0)
                if few:
                    wanted = tl.maximum(tl.ceil(top_p * held.to(tl.float64)).to(tl.int64), 1)
                settled = settled | (held >= wanted)
                wanted = tl.minimum(wanted, held)
                edge = _largest(keys, weights, edge, highest, wanted)
                over = tl.sum(tl.where(keys > edge, weights, 0), 0)
                on = tl.where(keys == edge, weights, 0)
                before = over + tl.cumsum(on, 0) - on
                stays = stays & ((keys > edge) | ((keys == edge) & (before < wanted)))
            if min_p > 0.0:
                floor = min_p_key(peak, temperature, min_p)
                settled = settled | (floor > last_key)
                stays = stays & (keys >= floor)
            weights = tl.where(stays, weights, 0)
            if EDITED:
                typical_p = double(edits + device_row * EDIT_WIDTH + TYPICAL)
                if typical_p < 1.0:
                    left = tl.where(stays, z, NEG_INF)
                    weights = _typical(weights, left, peak, scale, typical_p)
            total_left = tl.sum(weights, 0)
            place = tl.load(positions + tl.load(draw_tokens + draw)) + 1
            u = uniform(tl.load(mine + 4), tl.load(mine + 5), tl.load(mine + 6), place)
            local = tl.minimum((u * total_left.to(tl.float64)).to(tl.int64), total_left - 1)
            token = tl.min(tl.where(tl.cumsum(weights, 0) > local, ids, VOCAB - 1), 0)
        tl.store(tokens + draw, token, mask=settled)
        tl.store(last + device_row, tl.where(fine, token, 0), mask=settled)
    tl.store(done + draw, settled.to(tl.int32))

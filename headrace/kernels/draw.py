"""Last pass: a token a row, from the chunks' peaks and weights. Inverse CDF in order of ids.

Plain reference: `sampling.pipeline`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.philox import uniform
from headrace.kernels.truncation import kept_of
from headrace.kernels.typical import typical_weights, wants_typical
from headrace.kernels.weights import COLUMNS, NEG_INF, is_few, ordered, slope, unordered, weight


@triton.jit
def _first_over(ids, weights, local, VOCAB):
    """The first id whose cumulative weight exceeds `local` (int64, below their sum)."""
    return tl.min(tl.where(tl.cumsum(weights, 0) > local, ids, VOCAB - 1), 0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def draw_kernel(
    logits,
    sources,
    table,
    positions,
    draw_tokens,
    draw_rows,
    last,
    tokens,
    peaks,
    firsts,
    masses,
    equals,
    edges,
    rooms,
    edits,
    on_mass,
    centres,
    limits,
    lefts,
    done,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    WEIGH: tl.constexpr,
    TRUNCATE: tl.constexpr,
    TYPICAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (draws,). Greedy rows take the first largest logit, others the token at u; what
    `few_kernel` has drawn stays.

    With TRUNCATE `masses` holds the weights above the row's edge and `equals` [draws, chunks]
    counts the tokens on it, of which the first rooms[draw] stay. With TYPICAL, in rows that use
    typical_p, `masses` are of the tokens nearer than the limit, against the row's peak; on_mass of
    those just there, of which the first that reach lefts[draw] stay. Instead of a token: -1 where
    the row holds NaN or +inf, -2 where nothing in it is finite.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    device_row = tl.load(draw_rows + draw)
    chunk = tl.arange(0, CHUNKS_PADDED)
    real = chunk < CHUNKS
    at = draw * CHUNKS + chunk
    chunk_peak = tl.load(peaks + at, mask=real, other=NEG_INF)
    peak = tl.max(chunk_peak, 0)
    fine = (peak > NEG_INF) & (peak < float("inf"))
    owner = tl.min(tl.where(chunk_peak == peak, chunk, CHUNKS_PADDED), 0)
    token = tl.load(firsts + draw * CHUNKS + owner)
    mine = table + device_row * 8
    drawn = draw < 0  # no
    if WEIGH:
        drawn = is_few(mine)
        if TRUNCATE:
            drawn = tl.load(done + draw) != 0
        temperature = tl.load(mine).to(tl.float32, bitcast=True)
        if (temperature > 0.0) & fine & (drawn == 0):
            scale = slope(temperature)
            base = tl.where(chunk_peak > NEG_INF, chunk_peak, peak)
            mass = tl.load(masses + at, mask=real, other=0)
            edge, room = 0, 0
            room_left = tl.zeros_like(chunk)
            typical = temperature < 0.0  # no
            if TYPICAL:
                typical, _, _ = wants_typical(table, edits, device_row, peak)
                base = tl.where(typical, peak, base)
            if TRUNCATE:
                edge, room = tl.load(edges + draw), tl.load(rooms + draw)
                equal = tl.load(equals + at, mask=real, other=0)
                room_left = tl.maximum(room - (tl.cumsum(equal, 0) - equal), 0)
                one = weight(tl.minimum(unordered(edge), base), base, scale)
                mass += tl.where(typical, 0, tl.minimum(room_left, equal).to(tl.int64) * one)
            row = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
            on_left = tl.zeros_like(mass)
            limit = 0
            if TYPICAL:  # noqa: SIM102 - the compiler knows one of the two
                if typical:
                    limit = tl.load(limits + draw)
                    on = tl.load(on_mass + at, mask=real, other=0)
                    left = tl.load(lefts + draw) - (tl.cumsum(on, 0) - on)
                    on_left = tl.minimum(tl.maximum(left, 0), on)
                    parted = (on_left > 0) & (on_left < on)  # at most one chunk: its ids decide
                    mass += on_left
                    if tl.sum(parted.to(tl.int32), 0) > 0:
                        ids = tl.sum(tl.where(parted, chunk, 0), 0) * CHUNK + tl.arange(0, CHUNK)
                        z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF).to(tl.float32)
                        inside = typical_weights(
                            z, peak, scale, edge, tl.sum(tl.where(parted, room_left, 0), 0),
                            centres + draw * 2, limit, tl.sum(tl.where(parted, on_left, 0), 0),
                        )  # fmt: skip
                        mass = tl.where(parted, tl.sum(inside, 0), mass)
            # Float64 in one fixed order of additions: the row's own, whatever the batch.
            factor = tl.exp((base - peak).to(tl.float64) / temperature.to(tl.float64))
            share = mass.to(tl.float64) * factor
            cumulative = tl.cumsum(share, 0)
            place = tl.load(positions + tl.load(draw_tokens + draw)) + 1
            u = uniform(tl.load(mine + 4), tl.load(mine + 5), tl.load(mine + 6), place)
            target = u * tl.sum(share, 0)
            weighs = share > 0.0
            over = weighs & (cumulative > target)
            first = tl.min(tl.where(over, chunk, CHUNKS_PADDED), 0)
            final = tl.max(tl.where(weighs, chunk, 0), 0)  # where u * total rounded up
            chosen = tl.minimum(first, final)
            here = chunk == chosen
            offset = tl.sum(tl.where(here, target - (cumulative - share), 0.0), 0)
            offset /= tl.sum(tl.where(here, factor, 0.0), 0)
            most = tl.sum(tl.where(here, mass, 0), 0) - 1
            local = tl.minimum(tl.maximum(offset, 0.0), most.to(tl.float64)).to(tl.int64)
            local = tl.minimum(local, most)
            here_peak = tl.max(tl.where(here, base, NEG_INF), 0)
            here_room = tl.sum(tl.where(here, room_left, 0), 0)
            ids = chosen * CHUNK + tl.arange(0, CHUNK)
            z = tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF).to(tl.float32)
            weights = weight(tl.minimum(z, here_peak), here_peak, scale)
            if TRUNCATE:
                weights = tl.where(kept_of(ordered(z), edge, here_room), weights, 0)
            if TYPICAL:  # noqa: SIM102 - the compiler knows one of the two
                if typical:
                    weights = typical_weights(
                        z, peak, scale, edge, here_room, centres + draw * 2, limit,
                        tl.sum(tl.where(here, on_left, 0), 0),
                    )  # fmt: skip
            token = _first_over(ids, weights, local, VOCAB)
    tl.store(
        tokens + draw, tl.where(fine, token, tl.where(peak > NEG_INF, -1, -2)), mask=drawn == 0
    )
    tl.store(last + device_row, tl.where(fine, token, 0), mask=drawn == 0)

"""What a row's rules and penalties do to its logits, in place and sparsely: only ids that a list or
the sequence names are touched. Definitions: `sampling.reference`.

`marks` [draws, vocab] int32 is zero before and after: a first pass over a row's ids leaves there
what a token needs to know (its count, its longest repeat), a second takes it and leaves 0, so that
one of several equal ids changes the logit, once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.edit_params import (
    ALLOWED,
    AT,
    BANNED,
    BIASES,
    BREAKERS,
    DRY_ALLOWED,
    DRY_LOG_BASE,
    DRY_MULTIPLIER,
    DRY_WINDOW,
    FREQUENCY,
    HELD,
    LONGEST_WORD,
    LZ_STRENGTH,
    LZ_WINDOW,
    MIN_TOKENS,
    PENALTY_WINDOW,
    PRESENCE,
    PROMPT_TOKENS,
    REPETITION,
    USES,
    USES_DRY,
    USES_LZ,
    USES_REPETITION,
    WIDTH,
    WORDS,
)
from headrace.kernels.history import ids_at, match_lengths
from headrace.kernels.weights import COLUMNS, NEG_INF
from headrace.kernels.widen import open_bit

LONGEST_MATCH = tl.constexpr(256)  # tokens of a repeat that dry counts
MOST_DRY = tl.constexpr(1000.0)
BREAKERS_TOGETHER = tl.constexpr(16)
LZ_LOOKBACK = tl.constexpr(32)
SEEN = tl.constexpr(-(2**31))  # mark of a token of the prompt
PLACES = tl.constexpr(2**25)  # lz marks are match length * PLACES + place in the window + 1


@triton.jit
def double(entry):
    """float64 of two float32 entries of a row of the table."""
    high = tl.load(entry).to(tl.float32, bitcast=True).to(tl.float64)
    return high + tl.load(entry + 1).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _begin_of(mine, window_at, length):
    """First position inside the window that an entry names; 0 = all."""
    window = tl.load(mine + window_at)
    return tl.where((window > 0) & (window < length), length - window, 0)


@triton.jit
def _rules(
    z, source, mine, arena, masks, slot, slots, table, length, VOCAB, BLOCK, N: tl.constexpr
):
    """Allowed ids are copied (through the mask), then bias, then bans."""
    lane = tl.arange(0, N)
    mine_at = arena + tl.load(mine + AT)
    biases, allowed = tl.load(mine + BIASES), tl.load(mine + ALLOWED)
    banned, held = tl.load(mine + BANNED), tl.load(mine + HELD)
    allowed_at = mine_at + 2 * biases
    for start in range(0, allowed, N):
        real = start + lane < allowed
        ids = tl.load(allowed_at + start + lane, mask=real, other=0)
        real = real & open_bit(masks, slot, ids, real, (VOCAB + 31) // 32)
        value = tl.load(source + ids, mask=real, other=NEG_INF).to(tl.float32)
        tl.store(z + ids, value, mask=real)
    tl.debug_barrier()
    for start in range(0, biases, N):
        real = start + lane < biases
        ids = tl.load(mine_at + start + lane, mask=real, other=0)
        bias = tl.load(mine_at + biases + start + lane, mask=real, other=0)
        value = tl.load(z + ids, mask=real, other=NEG_INF)
        tl.store(z + ids, value + bias.to(tl.float32, bitcast=True), mask=real)
    tl.debug_barrier()
    banned_at = allowed_at + allowed
    before = length - tl.load(mine + PROMPT_TOKENS)
    bans = banned + tl.where(before < tl.load(mine + MIN_TOKENS), held, 0)
    for start in range(0, bans, N):
        real = start + lane < bans
        ids = tl.load(banned_at + start + lane, mask=real, other=0)
        tl.store(z + ids, NEG_INF, mask=real)
    words, longest = tl.load(mine + WORDS), tl.load(mine + LONGEST_WORD)
    words_at = banned_at + banned + held + tl.load(mine + BREAKERS)
    for start in range(0, words, N):
        real = start + lane < words
        word = mine_at + tl.load(words_at + start + lane, mask=real, other=0)
        before_last = tl.load(words_at + words + start + lane, mask=real, other=1) - 1
        real = real & (before_last <= length)
        for k in range(longest - 1):
            asked = real & (k < before_last)
            wanted = tl.load(word + k, mask=asked, other=0)
            there = ids_at(slots, table, length - before_last + k, asked, BLOCK)
            real = real & ((wanted == there) | (k >= before_last))
        ids = tl.load(word + before_last, mask=real, other=0)
        tl.store(z + ids, NEG_INF, mask=real)


@triton.jit
def _repetition(z, marks, mine, slots, table, length, BLOCK, N: tl.constexpr):
    begin = _begin_of(mine, PENALTY_WINDOW, length)
    prompt = tl.load(mine + PROMPT_TOKENS)
    repetition = double(mine + REPETITION)
    frequency, presence = double(mine + FREQUENCY), double(mine + PRESENCE)
    for start in range(begin, length, N):
        at = start + tl.arange(0, N)
        real = at < length
        ids = ids_at(slots, table, at, real, BLOCK)
        tl.atomic_add(marks + ids, 1, mask=real & (at >= prompt), sem="relaxed")
        tl.atomic_or(marks + ids, SEEN, mask=real & (at < prompt), sem="relaxed")
    tl.debug_barrier()
    for start in range(begin, length, N):
        at = start + tl.arange(0, N)
        real = at < length
        ids = ids_at(slots, table, at, real, BLOCK)
        mark = tl.atomic_xchg(marks + ids, 0, mask=real, sem="relaxed")
        real = real & (mark != 0)
        value = tl.load(z + ids, mask=real, other=0.0).to(tl.float64)
        value = tl.where(value > 0.0, value / repetition, value * repetition)
        count = mark & 0x7FFFFFFF
        value -= frequency * count.to(tl.float64) + tl.where(count > 0, presence, 0.0)
        tl.store(z + ids, value.to(tl.float32), mask=real)


@triton.jit
def _lz(z, marks, mine, slots, table, length, scratch, VOCAB, BLOCK, N: tl.constexpr):
    begin = _begin_of(mine, LZ_WINDOW, length)
    strength = double(mine + LZ_STRENGTH)
    for start in range(begin, length, N):
        at = start + tl.arange(0, N)
        real = at < length
        ids = ids_at(slots, table, at, real, BLOCK)
        matched = match_lengths(
            slots, table, start, begin, length, LZ_LOOKBACK, scratch, BLOCK, N
        )  # fmt: skip
        mark = matched * PLACES + (at - begin) + 1
        tl.atomic_max(marks + ids, mark, mask=real, sem="relaxed")
    tl.debug_barrier()
    literal_bits = tl.log2(tl.full((), VOCAB, tl.float64))
    for start in range(begin, length, N):
        at = start + tl.arange(0, N)
        real = at < length
        ids = ids_at(slots, table, at, real, BLOCK)
        mark = tl.atomic_xchg(marks + ids, 0, mask=real, sem="relaxed")
        real = real & (mark != 0)
        place = (mark - 1) % PLACES
        distance = tl.maximum(length - begin - place, 1).to(tl.float64)
        saved = tl.maximum(literal_bits - tl.log2(distance), 0.0)
        value = tl.load(z + ids, mask=real, other=0.0).to(tl.float64) - strength * saved
        tl.store(z + ids, value.to(tl.float32), mask=real)


@triton.jit
def _is_breaker(ids, breakers_at, breakers):
    found = ids != ids
    lane = tl.arange(0, BREAKERS_TOGETHER)
    for start in range(0, breakers, BREAKERS_TOGETHER):
        known = tl.load(breakers_at + start + lane, mask=start + lane < breakers, other=-2)
        equal = ids[:, None] == known[None, :]
        found = found | (tl.max(equal.to(tl.int32), 1) > 0)
    return found


@triton.jit
def _dry(z, marks, mine, arena, slots, table, length, scratch, BLOCK, N: tl.constexpr):
    begin = _begin_of(mine, DRY_WINDOW, length)
    allowed = tl.load(mine + DRY_ALLOWED)
    multiplier, log_base = double(mine + DRY_MULTIPLIER), double(mine + DRY_LOG_BASE)
    breakers = tl.load(mine + BREAKERS)
    breakers_at = arena + tl.load(mine + AT) + 2 * tl.load(mine + BIASES) + tl.load(mine + ALLOWED)
    breakers_at += tl.load(mine + BANNED) + tl.load(mine + HELD)
    back = tl.arange(0, LONGEST_MATCH)
    real_back = back < length - begin
    tail = ids_at(slots, table, length - 1 - back, real_back, BLOCK)
    ends = _is_breaker(tail, breakers_at, breakers) | (real_back == 0)
    longest = tl.min(tl.where(ends, back, LONGEST_MATCH), 0)
    if longest >= allowed:
        for start in range(begin, length, N):
            at = start + tl.arange(0, N)
            real = at < length
            matched = match_lengths(
                slots, table, start, begin, length, longest, scratch, BLOCK, N
            )  # fmt: skip
            real = real & (matched >= allowed)
            if tl.max(real.to(tl.int32), 0) > 0:
                ids = ids_at(slots, table, at, real, BLOCK)
                real = real & (_is_breaker(ids, breakers_at, breakers) == 0)
                tl.atomic_max(marks + ids, matched + 1, mask=real, sem="relaxed")
        tl.debug_barrier()
        for start in range(begin, length, N):
            at = start + tl.arange(0, N)
            real = at < length
            ids = ids_at(slots, table, at, real, BLOCK)
            mark = tl.atomic_xchg(marks + ids, 0, mask=real, sem="relaxed")
            real = real & (mark != 0)
            over = (mark - 1 - allowed).to(tl.float64)
            log_penalty = tl.minimum(tl.log(multiplier) + over * log_base, 700.0)
            penalty = tl.minimum(tl.exp(log_penalty), MOST_DRY)
            value = tl.load(z + ids, mask=real, other=0.0).to(tl.float64) - penalty
            tl.store(z + ids, value.to(tl.float32), mask=real)


@triton.jit(do_not_specialize_on_alignment=(*COLUMNS, "tables"), do_not_specialize=["width"])
def edit_kernel(
    logits,
    sources,
    edits,
    arena,
    masks,
    mask_slots,
    positions,
    draw_tokens,
    draw_rows,
    slots,
    tables,
    width,
    wide,
    broken,
    marks,
    places,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (draws,): one program changes a row of `wide` [draws, VOCAB] float32, which `widen`
    wrote. A broken row becomes one that cannot be drawn; broken is 0 again. places [draws, 2, N].
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    draw = tl.program_id(0)
    row = tl.load(draw_rows + draw)
    length = tl.load(positions + tl.load(draw_tokens + draw)) + 1
    mine, table = edits + row * WIDTH, tables + row.to(tl.int64) * width
    source = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
    z, mine_marks = wide + draw.to(tl.int64) * VOCAB, marks + draw.to(tl.int64) * VOCAB
    slot = tl.load(mask_slots + draw)
    scratch = places + draw * 2 * N
    _rules(z, source, mine, arena, masks, slot, slots, table, length, VOCAB, BLOCK, N)
    uses = tl.load(mine + USES)
    if uses & USES_REPETITION:
        tl.debug_barrier()
        _repetition(z, mine_marks, mine, slots, table, length, BLOCK, N)
    if uses & USES_LZ:
        tl.debug_barrier()
        _lz(z, mine_marks, mine, slots, table, length, scratch, VOCAB, BLOCK, N)
    if uses & USES_DRY:
        tl.debug_barrier()
        _dry(z, mine_marks, mine, arena, slots, table, length, scratch, BLOCK, N)
    bad = tl.load(broken + draw)
    tl.debug_barrier()
    if bad != 0:
        tl.store(z, float("nan"))
        tl.store(broken + draw, 0)

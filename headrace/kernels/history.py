"""Ids of a sequence, read from the slots of the KV cache where its tokens stand."""

from __future__ import annotations

import triton
import triton.language as tl

POSITIONS = tl.constexpr(64)  # whose matches are compared side by side
TOGETHER = tl.constexpr(32)  # ids of each that are compared before anybody looks


@triton.jit
def ids_at(slots, table, positions, real, BLOCK: tl.constexpr):
    """The ids at these positions of a sequence, -1 where not `real`.

    slots [blocks, BLOCK] int32: the id of each slot of the cache; table: the row's block ids.
    """
    block = tl.load(table + positions // BLOCK, mask=real, other=0)
    at = block.to(tl.int64) * BLOCK + positions % BLOCK
    return tl.load(slots + at, mask=real, other=-1)


@triton.jit
def id_at(slots, table, position, BLOCK: tl.constexpr):
    """The id at one position."""
    block = tl.load(table + position // BLOCK)
    return tl.load(slots + block.to(tl.int64) * BLOCK + position % BLOCK)


@triton.jit
def _matched(slots, table, at, real, first, length, longest, BLOCK: tl.constexpr):
    """`match_lengths` of a few positions, TOGETHER ids of each at a time."""
    matched = tl.zeros_like(at)
    alive = real
    done = tl.zeros((), tl.int32)
    going = longest > 0
    while going:
        step = tl.arange(0, TOGETHER)
        k = done + step
        counts = k < tl.minimum(longest, length)
        tail = ids_at(slots, table, length - 1 - k, counts, BLOCK)
        before = at[:, None] - 1 - k[None, :]
        there = alive[:, None] & counts[None, :] & (before >= first)
        same = there & (ids_at(slots, table, before, there, BLOCK) == tail[None, :])
        agreed = tl.min(tl.where(same, TOGETHER, step[None, :]), 1)
        matched += tl.where(alive, agreed, 0)
        alive = alive & (agreed == TOGETHER)
        done += TOGETHER
        going = (tl.max(alive.to(tl.int32), 0) > 0) & (done < longest)
    return matched


@triton.jit
def match_lengths(
    slots, table, start, first, length, longest, scratch, BLOCK: tl.constexpr, N: tl.constexpr
):
    """For each of N positions from `start` on, below `length`: the largest k <= longest such that
    the k ids before it are the last k of the sequence ids[first:length]; those before `first` do
    not count.

    Only positions behind the sequence's last id are looked at further: they are gathered in scratch
    [2, N] int32 of this program.
    """
    lane = tl.arange(0, N)
    at = start + lane
    there = (at < length) & (at > first) & (longest > 0)
    last = id_at(slots, table, length - 1, BLOCK)
    matches = there & (ids_at(slots, table, at - 1, there, BLOCK) == last)
    matched = tl.zeros_like(at)
    number = tl.sum(matches.to(tl.int32), 0)
    if number > 0:
        place = tl.cumsum(matches.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(scratch + place, lane, mask=matches)
        tl.debug_barrier()
        for begin in range(0, number, POSITIONS):
            i = begin + tl.arange(0, POSITIONS)
            one = tl.load(scratch + i, mask=i < number, other=0)
            found = _matched(
                slots, table, start + one, i < number, first, length, longest, BLOCK
            )  # fmt: skip
            tl.store(scratch + N + one, found, mask=i < number)
        tl.debug_barrier()
        matched = tl.load(scratch + N + lane, mask=matches, other=0)
    return matched

"""Ids of a sequence, read from the slots of the KV cache where its tokens stand."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl

# Ids of a match that are compared before anybody looks; the interpreter gains nothing by it.
TOGETHER = tl.constexpr(1 if pdl.INTERPRETED else 8)


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
def match_lengths(slots, table, at, real, first, length, longest, BLOCK: tl.constexpr):
    """For each position in `at`: the largest k <= longest such that the k ids before it are the
    last k of the sequence ids[first:length]; those before `first` do not count.
    """
    matched = tl.zeros_like(at)
    alive = real
    k = tl.zeros((), tl.int32)
    going = longest > 0
    while going:
        for _ in tl.static_range(TOGETHER):  # their loads do not wait for each other
            counts = k < tl.minimum(longest, length)
            tail = id_at(slots, table, tl.maximum(length - 1 - k, 0), BLOCK)
            before = at - 1 - k
            there = real & (before >= first) & counts
            alive = alive & there & (ids_at(slots, table, before, there, BLOCK) == tail)
            matched += alive.to(tl.int32)
            k += 1
        going = (tl.max(alive.to(tl.int32), 0) > 0) & (k < longest)
    return matched

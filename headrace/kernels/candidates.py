"""The few largest logits of a row, found without reading all of it again.

A pass over the row has named the largest of each group of neighbours. At least k tokens are as
large as the k-th largest of those, so only the groups that reach it are read again, and only their
tokens that reach it are candidates: hardly more than k where large logits lie anywhere. They stand
in the order of their ids. Should more be left than are held, a search for a narrower limit goes
over the candidates, or over the row where there is no room for them: slower, the same tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.truncation import KEEP_ALL
from headrace.kernels.weights import NEG_INF, ordered

TILE = tl.constexpr(1024)  # logits or candidates that are looked at together
TILE_GROUPS = tl.constexpr(32)


@triton.jit
def count_reaching(keys, pivot):
    """How many of `keys` are `pivot` or more."""
    return tl.sum((keys >= pivot).to(tl.int32), 0)


@triton.jit
def _loose(keys, low, high, k, most):
    """A key that k to `most` of the keys reach, or the largest that k do, or `low`."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    found = count_reaching(keys, low.to(tl.int32))
    while (low < high) & (found > most):
        middle = low + (high - low + 1) // 2
        reached = count_reaching(keys, middle.to(tl.int32))
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
        found += ((keys >= pivot) & (start + tl.arange(0, TILE) < n)).to(tl.int32)
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
        equal = (keys == edge) & (start + tl.arange(0, TILE) < n)
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
def candidates_of(
    row, tops, keys_at, ids_at, lowest, highest, k,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr,
    HELD: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """(limit, n): n <= HELD tokens at or above a limit, the k largest among them, in order, as keys
    of `ordered` and ids. All keys that count lie in [lowest, highest], int32.

    tops [GROUPS] int32, the keys of the groups' largest, is written over; keys_at, ids_at [ROOM].
    """
    group = tl.arange(0, GROUPS_PADDED)
    top = tl.load(tops + group, mask=group < GROUPS, other=KEEP_ALL)
    limit = _loose(top, lowest, highest, k, k + k // 4 + 8)
    reaches = top >= limit
    groups = tl.sum(reaches.to(tl.int32), 0)
    listed = tl.cumsum(reaches.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(tops + listed, group, mask=reaches)  # what was read becomes the list of them
    tl.debug_barrier()
    n = tl.zeros((), tl.int32)
    for start in range(0, groups, TILE_GROUPS):
        i = start + tl.arange(0, TILE_GROUPS)
        which = tl.load(tops + i, mask=i < groups, other=GROUPS)
        ids = which[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        ids = tl.reshape(ids, (TILE_GROUPS * GROUP,))
        keys = ordered(tl.load(row + ids, mask=ids < VOCAB, other=NEG_INF).to(tl.float32))
        inside = (keys >= limit) & (ids < VOCAB)
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

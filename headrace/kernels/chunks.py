"""Several new tokens of a sequence as one piece of work, its cut into tiles of queries, and of
those that would run on when most of the card has nothing left, into parts of their keys."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]

TILE_WORDS = 5
_WAVES = 8  # programs a place on the card, from which on the last ones hardly count
_LEAST_KEYS = 4  # tiles of keys of a part
_PART_COST = 3  # of leaving and adding up a part's result, in tiles of keys
_GAIN = 0.95  # time of a split plan over that of whole tiles, to be worth it


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How work is cut: a tile is `rows` rows of one KV head, `keys` keys a turn of its loop.

    group: query heads a KV head; places: programs that the card runs at once, 0: never split.
    """

    group: int
    kv_heads: int
    rows: int
    keys: int
    places: int

    @property
    def max_parts(self) -> int:
        """The most parts of tiles in a plan."""
        return 2 * self.places // self.kv_heads

    def max_tiles(self, tokens: int, chunks: int) -> int:
        """The most tiles, parts counted, of that many chunks of `tokens` tokens in all."""
        return tokens * self.group // self.rows + chunks + self.max_parts

    def words(self, tokens: int, chunks: int) -> int:
        """The longest plan of them."""
        return 4 * chunks + TILE_WORDS * self.max_tiles(tokens, chunks)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """n chunks on the device: chunk c computes positions [starts[c], starts[c] + counts[c]) of the
        sequence in row rows[c]; its queries are [firsts[c], firsts[c] + counts[c]) of the step's.

        rows, starts, counts, firsts [n] int32;
        tiles [m, TILE_WORDS] int32: (chunk, which tile of it, part, parts, slot).
        A tile is `tile_rows` rows of one KV head, where a chunk has counts[c] * group rows: row
    r is head r % group of query r // group. Its keys are cut into `parts` even parts; results of
    more than one meet in scratch memory, from `slot` on. A tile of chunk -1 is padding: a captured
    graph has as many programs at each replay.
    """

    rows: Tensor
    starts: Tensor
    counts: Tensor
    firsts: Tensor
    tiles: Tensor
    tile_rows: int

    @staticmethod
    def plan(
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        firsts: Sequence[int],
        tiling: Tiling,
    ) -> Ints:
        """All of them as one array for one copy, which `of` takes apart again. Counts are >= 1.

        Tiles with many keys come first, so that no multiprocessor ends with a long one.
        """
        columns = np.array([rows, starts, counts, firsts], np.int32)
        assert (columns[2] > 0).all(), "a chunk has at least one token"
        group, tile_rows = tiling.group, tiling.rows
        tiles_each = -(-columns[2] * group // tile_rows)
        chunk = np.repeat(np.arange(len(rows), dtype=np.int32), tiles_each)
        ends = np.cumsum(tiles_each)
        tile = np.arange(chunk.size, dtype=np.int32) - np.repeat(ends - tiles_each, tiles_each)
        last = np.minimum(-(-(tile + 1) * tile_rows // group), columns[2, chunk])
        keys = columns[1, chunk] + last
        order = np.argsort(-keys, kind="stable")
        parts = np.array(choose_parts((-(-keys[order] // tiling.keys)).tolist(), tiling), np.int32)
        index = np.repeat(order, parts)
        part = np.arange(index.size) - np.repeat(np.cumsum(parts) - parts, parts)
        taken = np.where(parts > 1, parts, 0)
        slot = np.repeat(np.where(parts > 1, np.cumsum(taken) - taken, 0), parts)
        tiles = np.stack((chunk[index], tile[index], part, np.repeat(parts, parts), slot), 1)
        return np.concatenate((columns.ravel(), tiles.ravel())).astype(np.int32)

    @classmethod
    def of(cls, plan: Tensor, n: int, tile_rows: int) -> Chunks:
        """Views of a plan of n chunks, wherever it was copied to."""
        rows, starts, counts, firsts = plan[: 4 * n].view(4, n)
        tiles = plan[4 * n :].view(-1, TILE_WORDS)
        return cls(rows, starts, counts, firsts, tiles, tile_rows)


def choose_parts(lengths: list[int], tiling: Tiling) -> list[int]:
    """Parts of each tile, whose keys make lengths[i] turns, longest first. Sum of those that are
    more than one: at most tiling.max_parts.

    Programs take places as they come free, the longest first. Tiles that end by the time that all
    work dealt evenly would take stay whole; the rest are cut to fill what is left of it.
    """
    whole = [1] * len(lengths)
    heads, places = tiling.kv_heads, tiling.places
    if places < heads or len(lengths) * heads >= _WAVES * places:
        return whole
    even = sum(lengths) * heads / places
    busy = [0] * places
    late: list[int] = []
    for i, length in enumerate(lengths):
        earliest = [heapq.heappop(busy) for _ in range(heads)]
        fits = earliest[-1] + length <= even
        for one in earliest:
            heapq.heappush(busy, one + length * fits)
        if not fits:
            late.append(i)
    left = sum(lengths[i] for i in late)
    best, best_end = whole, _GAIN * _end(busy, [lengths[i] for i in late], heads)
    for most in (places // heads, 2 * places // heads):
        parts = list(whole)
        for i in late:
            parts[i] = max(1, min(most * lengths[i] // left, lengths[i] // _LEAST_KEYS))
        cut = [-(-lengths[i] // parts[i]) + _PART_COST for i in late for _ in range(parts[i])]
        end = _end(busy, sorted(cut, reverse=True), heads)
        if end < best_end:
            best, best_end = parts, end
    return best


def _end(busy: list[int], lengths: list[int], heads: int) -> int:
    """When the last place is free, after `heads` programs of each length took the first free."""
    places = list(busy)
    for length in lengths:
        for _ in range(heads):
            heapq.heapreplace(places, places[0] + length)
    return max(places)

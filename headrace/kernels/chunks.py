"""Several new tokens of a sequence as one piece of work, and its cut into tiles of queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """n chunks on the device: chunk c computes positions [starts[c], starts[c] + counts[c]) of the
    sequence in row rows[c]; its queries are [firsts[c], firsts[c] + counts[c]) of the step's.

    rows, starts, counts, firsts [n] int32; tiles [m, 2] int32: (chunk, which tile of it).
    A tile is `tile_rows` rows of one KV head, where a chunk has counts[c] * group rows: row
    r is head r % group of query r // group.
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
        *,
        group: int,
        tile_rows: int,
    ) -> Ints:
        """All of them as one array for one copy, which `of` takes apart again. Counts are >= 1.

        Tiles with many keys come first, so that no multiprocessor ends with a long one.
        """
        columns = np.array([rows, starts, counts, firsts], np.int32)
        assert (columns[2] > 0).all(), "a chunk has at least one token"
        tiles_each = -(-columns[2] * group // tile_rows)
        chunk = np.repeat(np.arange(len(rows), dtype=np.int32), tiles_each)
        ends = np.cumsum(tiles_each)
        tile = np.arange(chunk.size, dtype=np.int32) - np.repeat(ends - tiles_each, tiles_each)
        keys = columns[1, chunk] + np.minimum((tile + 1) * tile_rows // group, columns[2, chunk])
        order = np.argsort(-keys, kind="stable")
        tiles = np.stack((chunk, tile), 1)[order]
        return np.concatenate((columns.ravel(), tiles.ravel())).astype(np.int32)

    @classmethod
    def of(cls, plan: Tensor, n: int, tile_rows: int) -> Chunks:
        """Views of a plan of n chunks, wherever it was copied to."""
        rows, starts, counts, firsts = plan[: 4 * n].view(4, n)
        return cls(rows, starts, counts, firsts, plan[4 * n :].view(-1, 2), tile_rows)

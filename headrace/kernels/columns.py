"""The columns of one step on the device: one entry a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

# They may be slices of a larger table: their alignment is no reason to compile a kernel anew.
COLUMNS = ("rows", "positions", "writes", "tables")


@dataclasses.dataclass(frozen=True)
class StepColumns:
    """Token t is its own query: it attends to positions 0..positions[t] of its sequence.

    rows [T] int32       device row of the token's sequence
    positions [T] int32  the token's position in it
    writes [T] int32     1: store its K and V; 0: the cache has them
    tables [rows, width] int32   block ids of every device row, in one KV group

    Padding: the spare row (the last one of `tables`, all spare blocks), position 0, writes 0.
    """

    rows: Tensor
    positions: Tensor
    writes: Tensor
    tables: Tensor

    def over(self, tables: Tensor) -> StepColumns:
        """The same tokens with other tables."""
        return StepColumns(self.rows, self.positions, self.writes, tables)

    def first(self, tokens: int) -> StepColumns:
        """The first so many tokens."""
        return StepColumns(
            self.rows[:tokens], self.positions[:tokens], self.writes[:tokens], self.tables
        )


GroupColumns = Sequence[StepColumns]  # of one step, one a KV group: they differ in their tables

"""The device tables: what the runner knows of each running sequence; plan deltas change them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.messages import Grow, Join, StepPlan
from headrace.sampling.history import Ids
from headrace.sampling.params import GREEDY_BELOW, Columns
from headrace.sampling.shaper import Shaper


class Rows:
    """Block table, sampling parameters and last drawn token of each device row; and, of rows with
    rules or penalties, what those look at.

    tables [KV groups, max_rows, width] int64; last [max_rows] int64.
    """

    def __init__(self, max_rows: int, width: int, groups: int = 1) -> None:
        self.tables = np.zeros((groups, max_rows, width), np.int64)
        self.last = np.zeros(max_rows, np.int64)
        self.columns = Columns.empty(max_rows)
        self.reports = [-1] * max_rows  # Sampling.logprobs of each row
        self.prompts = [0] * max_rows  # tokens of each row's prompt
        self._taken = [False] * max_rows
        self.recorded: set[int] = set()  # rows whose draws are shown
        self._shapers: dict[int, Shaper] = {}
        self._choosy: set[int] = set()  # rows that ask for more than their largest logit

    def leave(self, row: int) -> None:
        """The sequence in `row` is gone. Changes nothing for a free row: when a step broke, the
        next plan names its leaves again."""
        self._taken[row] = False
        self.recorded.discard(row)
        self._shapers.pop(row, None)
        self._choosy.discard(row)

    def join(self, join: Join) -> None:
        """A sequence takes a free row."""
        assert not self._taken[join.row], f"row {join.row} is joined twice"
        groups = len(self.tables)
        assert len(join.tables) == groups, f"{len(join.tables)} KV groups, this runner has {groups}"
        assert not join.adapter, "this runner has no adapters"
        self._taken[join.row] = True
        for group, table in enumerate(join.tables):
            self._put(group, join.row, 0, table)
        self.columns.set(join.row, join.sampling, join.choice)
        self.prompts[join.row] = join.prompt_tokens
        self.reports[join.row] = join.sampling.logprobs
        if join.record:
            self.recorded.add(join.row)
        if (shaper := Shaper.of(join)) is not None:
            self._shapers[join.row] = shaper
        if shaper is not None or join.sampling.logprobs >= 0 or not self.columns.greedy[join.row]:
            self._choosy.add(join.row)

    def grow(self, grow: Grow) -> None:
        """Append to, or replace in, a row's block table."""
        assert self._taken[grow.row], f"row {grow.row} grows but is free"
        assert grow.group < len(self.tables), f"no KV group {grow.group} here"
        self._put(grow.group, grow.row, grow.first, grow.blocks)

    def _put(self, group: int, row: int, first: int, blocks: list[int]) -> None:
        end = first + len(blocks)
        assert end <= self.tables.shape[2], f"row {row}: {end} blocks, {self.tables.shape[2]} fit"
        if blocks:
            self.tables[group, row, first:end] = blocks

    def taken(self, row: int) -> bool:
        """Whether a sequence owns `row`."""
        return self._taken[row]

    def draws(self, rows: list[int], positions: list[int]) -> Columns:
        """Sampling columns of the draws into `rows`."""
        columns = self.columns.take(rows)
        columns.position[:] = np.array(positions, dtype=np.uint64)
        return columns

    def shapers(self, rows: list[int]) -> list[Shaper | None]:
        """What shapes the logits of the draws into `rows`; [] if nothing does."""
        return [self._shapers.get(row) for row in rows] if self._shapers else []

    def want_largest(self, rows: list[int]) -> bool:
        """Whether the draws into `rows` are the largest logits and nothing is reported of them."""
        return self._choosy.isdisjoint(rows)

    def take_largest(self, rows: list[int]) -> npt.NDArray[np.bool_]:
        """Of the draws into `rows`: whether each takes the largest logit of those that its mask
        allows, as the model gives them. [len(rows)] Not those that are shown: so is their mask."""
        plain = [row not in self._shapers and row not in self.recorded for row in rows]
        return (self.columns.temperature[rows] < GREEDY_BELOW) & np.array(plain, np.bool_)

    def drew(self, rows: list[int], positions: list[int], tokens: list[int]) -> None:
        """tokens [len(rows)] were drawn into `rows`, at these positions."""
        self.last[rows] = tokens
        for j, row in enumerate(rows if self._shapers else []):
            self._learn(row, positions[j], [tokens[j]])

    def _learn(self, row: int, position: int, ids: list[int]) -> None:
        if (shaper := self._shapers.get(row)) is not None and shaper.history is not None:
            shaper.history.put(position, ids)

    def learn(self, plan: StepPlan) -> None:
        """The ids that a plan brings become history of rows that keep one."""
        if self._shapers:
            for row, start, ids in zip(plan.rows, plan.starts, plan.ids, strict=True):
                if ids is not None:
                    self._learn(row, start, ids)

    def ids(self, rows: list[int], ids: list[list[int] | None]) -> Ids:
        """The step's tokens [T] int64; None stands for the token last drawn into the row."""
        if not any(ids):  # all decode
            return self.last[rows]
        flat: list[int] = []
        places, owners = [], []
        for row, tokens in zip(rows, ids, strict=True):
            if tokens is None:
                places.append(len(flat))
                owners.append(row)
                flat.append(0)
            else:
                flat += tokens
        out = np.array(flat, np.int64)
        out[places] = self.last[owners]
        return out

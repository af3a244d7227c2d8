"""A step's columns on the device, and the pinned memory they are written to."""

from __future__ import annotations

import numpy as np
import torch

from headrace.backends.cuda.chunk_table import leading_singles
from headrace.backends.cuda.upload import Upload
from headrace.kernels.columns import GroupColumns, StepColumns
from headrace.messages import StepPlan


class StepInput:
    """Columns of at most `tokens` tokens and `draws` draws, all int32.

    rows, positions, writes, ids: one entry a token. alone: the position of a token that is a query
    of its own (those of the plan's first rows), -1 for one of a chunk. sources: the token behind
    each row of logits. draw_tokens, draw_rows, draw_logits: one entry a draw; the last is the row
    of logits that it draws from; drawn [3, draws]: these three as the host last wrote them.
    wanted_rows, wanted_positions: of the token behind each row of logits; behind the last of them,
    of a token that sees nothing.

    The host stores positions less one: the device moves them on as a step begins, so that a steady
    decode step needs no upload.
    """

    def __init__(self, tokens: int, draws: int, device: torch.device) -> None:
        self.tokens = tokens
        width = max(tokens, draws)
        self._device = torch.zeros((11, width), dtype=torch.int32, device=device)
        self.rows, self.positions, self.writes, self.ids, self.alone = self._device[:5, :tokens]
        self.sources, self.draw_tokens, self.draw_rows, self.draw_logits = self._device[5:9]
        self.wanted_rows, self.wanted_positions = self._device[9:]
        self._upload = Upload((11, width), device)
        self.drawn = np.zeros((3, 0), np.int32)
        self._following: tuple[list[int], list[int], list[int], list[int]] | None = None

    def columns(self, tokens: int, tables: torch.Tensor) -> GroupColumns:
        """The first `tokens` tokens, each where it stands in its sequence.

        tables [KV groups, rows, width], here and below: columns for each of the groups.
        """
        return _each(self.rows[:tokens], self.positions[:tokens], self.writes[:tokens], tables)

    def singles(self, tokens: int, tables: torch.Tensor) -> GroupColumns:
        """The same with the tokens of chunks at position -1: they see nothing."""
        return _each(self.rows[:tokens], self.alone[:tokens], self.writes[:tokens], tables)

    def wanted(self, count: int, tables: torch.Tensor) -> GroupColumns:
        """The first `count` tokens whose logits are wanted, their K and V written."""
        rows, positions = self.wanted_rows[:count], self.wanted_positions[:count]
        return _each(rows, positions, self.writes[:count], tables)

    def follows(self, plan: StepPlan) -> bool:
        """Whether the device already holds this plan's columns: every row decodes on.

        Call for every plan of these columns, with `load` for those that do not follow.
        """
        steady = (
            self._following == (plan.rows, plan.starts, plan.draw_from, plan.draw_into)
            and not plan.unwritten
            and all(ids is None for ids in plan.ids)
        )
        nexts = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
        self._following = (plan.rows, nexts, plan.draw_from, plan.draw_into)
        if plan.unwritten or len(nexts) != sum(plan.counts):
            self._following = None
        return steady

    def load(self, plan: StepPlan, sources: list[int], padded: int, spare_row: int) -> None:
        """Write the columns of `plan`, padded to `padded` tokens, and send them."""
        slot = self._upload.slot()
        counts = np.array(plan.counts)
        tokens = int(counts.sum())
        rows, positions, writes, ids, alone = slot[:5, :padded]
        rows[:tokens] = np.repeat(plan.rows, counts)
        firsts = np.cumsum(counts) - counts
        places = np.arange(tokens) - np.repeat(firsts - plan.starts, counts)
        positions[:tokens] = places - 1
        singles = leading_singles(plan)
        alone[:singles], alone[singles:] = places[:singles], -1
        writes[:tokens] = 1
        for row in plan.unwritten:
            writes[firsts[row] : firsts[row] + counts[row]] = 0
        flat: list[int] = []
        for given in plan.ids:
            flat += (-1,) if given is None else given
        ids[:tokens] = flat
        rows[tokens:], positions[tokens:], writes[tokens:], ids[tokens:] = spare_row, -1, 0, 0
        lasts = firsts + counts - 1
        slot[5, : len(sources)] = lasts[sources]
        slot[5, len(sources) :] = 0
        slot[9], slot[10] = spare_row, -1
        slot[9, : len(sources)] = np.array(plan.rows)[sources]
        slot[10, : len(sources)] = places[lasts[sources]]
        draws = len(plan.draw_from)
        slot[6, :draws] = lasts[plan.draw_from]
        slot[7, :draws] = plan.draw_into
        at = {row: i for i, row in enumerate(sources)}
        slot[8, :draws] = [at[row] for row in plan.draw_from]
        self.drawn = slot[6:9, :draws].copy()
        self._upload.send(self._device, len(slot))

    def pad(self, tokens: int, spare_row: int) -> None:
        """Write and send columns in which each of `tokens` tokens is padding."""
        self._following = None  # what the device had moved on is gone
        self.drawn = np.zeros((3, 0), np.int32)
        slot = self._upload.slot()
        slot[:] = 0
        slot[0, :tokens], slot[1, :tokens], slot[4, :tokens] = spare_row, -1, -1
        slot[9], slot[10] = spare_row, -1
        self._upload.send(self._device, len(slot))


def _each(
    rows: torch.Tensor, positions: torch.Tensor, writes: torch.Tensor, tables: torch.Tensor
) -> GroupColumns:
    return [StepColumns(rows, positions, writes, table) for table in tables]

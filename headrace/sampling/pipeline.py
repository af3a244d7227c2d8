"""Logits to tokens: stages over the batch, then one draw a row.

A stage is skipped as a whole when no row uses it, and touches only the rows that do: what a row
gets depends on that row alone. Greedy rows take the first largest logit and see no stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.params import Columns
from headrace.sampling.rng import uniform
from headrace.sampling.truncation import MinP, TopK, TopP


class Stage(Protocol):
    """One step between logits and the draw."""

    @property
    def name(self) -> str: ...

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        """The rows that use the stage, ascending."""

    def apply(self, logits: Tensor, columns: Columns) -> Tensor:
        """New logits [rows, vocab] float64 for these rows and these columns of theirs.

        May overwrite `logits`.
        """


class Temperature:
    """(z - max z) / T: the largest becomes 0, so no T can overflow."""

    name = "temperature"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return list(range(columns.temperature.size))

    def apply(self, logits: Tensor, columns: Columns) -> Tensor:
        peak = logits.amax(-1, keepdim=True)
        return logits.sub_(peak).div_(torch.from_numpy(columns.temperature)[:, None])


_ROWS_AT_ONCE = 8  # their float64 logits stay in the cache; rows do not touch each other

STAGES: tuple[Stage, ...] = (Temperature(), TopK(), TopP(), MinP())


def sample(
    logits: Tensor,
    columns: Columns,
    stages: Sequence[Stage] = STAGES,
    best: Tensor | None = None,
) -> Tensor:
    """One token a row.

    logits [draws, vocab] float32, finite or -inf, each row with a finite maximum -> [draws] int64.
    best [draws] int64: the first largest of each row, where the caller knows it.
    """
    greedy = columns.greedy
    if greedy.all():
        return logits.argmax(-1) if best is None else best
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    if greedy.any():
        still = torch.from_numpy(np.flatnonzero(greedy))
        tokens[still] = logits[still].argmax(-1) if best is None else best[still]
    drawn = np.flatnonzero(~greedy)
    for at in range(0, drawn.size, _ROWS_AT_ONCE):
        part = drawn[at : at + _ROWS_AT_ONCE]
        rows, some = torch.from_numpy(part), columns.take(part)
        kept = run_stages(logits[rows].double(), some, stages)
        u = torch.from_numpy(uniform(some.seed, some.choice, some.position))
        tokens[rows] = inverse_cdf(kept, u)
    return tokens


def run_stages(logits: Tensor, columns: Columns, stages: Sequence[Stage]) -> Tensor:
    """logits [rows, vocab] float64, overwritten, through every stage that some row uses."""
    for stage in stages:
        used = stage.rows(columns, logits.shape[1])
        if len(used) == logits.shape[0]:
            logits = stage.apply(logits, columns)
        elif used:
            logits[used] = stage.apply(logits[used], columns.take(used))
    return logits


def inverse_cdf(logits: Tensor, u: Tensor) -> Tensor:
    """logits [rows, vocab] float64, 0 <= u < 1 [rows] -> the token at u, [rows].

    The first token whose cumulative weight exceeds u times the total: never one of weight 0.
    """
    cumulative = (logits - logits.amax(-1, keepdim=True)).exp_().cumsum(-1)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # u * total may round up to total
    return torch.searchsorted(cumulative, torch.minimum(u[:, None] * total, below), right=True)[
        :, 0
    ]

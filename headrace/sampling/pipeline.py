"""Logits to tokens: stages over the batch, then one draw a row.

A stage is skipped as a whole when no row uses it, and touches only the rows that do: what a row
gets depends on that row alone. Greedy rows are shaped like others, then take the first largest
logit. `reference` has the definition of every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.params import Columns
from headrace.sampling.probe import Probe
from headrace.sampling.rng import uniform
from headrace.sampling.shaper import Shaper
from headrace.sampling.shaping import Bits, Line, shape, unpacked
from headrace.sampling.truncation import MinP, TopK, TopNSigma, TopP, TypicalP


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

STAGES: tuple[Stage, ...] = (Temperature(), TopNSigma(), TopK(), TopP(), MinP(), TypicalP())
NO_TOKEN = -1


def sample(
    logits: Tensor,
    columns: Columns,
    stages: Sequence[Stage] = STAGES,
    best: Tensor | None = None,
    shapers: Sequence[Shaper | None] = (),
    masks: Mapping[int, Bits] | None = None,
    probes: Mapping[int, Probe] | None = None,
) -> Tensor:
    """One token a row.

    logits [draws, vocab] float32, finite or -inf, each row with a finite maximum -> [draws] int64,
    NO_TOKEN where rules and grammar leave none.
    best [draws] int64: the first largest of each row of `logits`, where the caller knows it.
    shapers: one a draw, or none at all. masks: draw -> the tokens it may take.
    probes: draw -> what is shown what each stage leaves; no token depends on it.
    """
    greedy, probes = columns.greedy, probes or {}
    lines = _lines(columns, shapers, masks or {}, probes)
    if not lines and greedy.all():
        return logits.argmax(-1) if best is None else best
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    shaped = np.zeros(greedy.size, np.bool_)
    shaped[list(lines)] = True
    still = torch.from_numpy(np.flatnonzero(greedy & ~shaped))
    if still.numel():
        tokens[still] = logits[still].argmax(-1) if best is None else best[still]
    for row, line in lines.items():
        if greedy[row] and line.shaper is None and line.bits is not None:
            tokens[row] = _first_allowed(logits[row], line.bits, -1 if best is None else best[row])
            shaped[row] = False
            if line.probe is not None:
                bits = torch.from_numpy(unpacked(line.bits, logits.shape[1]))
                line.probe.note("mask", logits[row].masked_fill(~bits, -torch.inf))
    for whose in (greedy & shaped, ~greedy):
        rows = np.flatnonzero(whose)
        for at in range(0, rows.size, _ROWS_AT_ONCE):
            part = rows[at : at + _ROWS_AT_ONCE]
            some, drawn = columns.take(part), torch.from_numpy(part)
            mine = [lines[row]._replace(at=i) for i, row in enumerate(part) if row in lines]
            mine_too = {i: probes[row] for i, row in enumerate(part) if row in probes}
            tokens[drawn] = _sample_some(logits[drawn].double(), some, stages, mine, mine_too)
    return tokens


def _first_allowed(logits: Tensor, mask: Bits, best: Tensor | int) -> int:
    """The first largest of the tokens that `mask` allows; NO_TOKEN if that leaves none.

    best: the first largest of all, -1 if it is not known. Most often the mask allows it.
    """
    likely = int(best)
    if likely >= 0 and mask[likely >> 5] >> (likely & 31) & 1:
        return likely
    kept = np.where(unpacked(mask, logits.shape[0]), logits.numpy(), -np.inf)
    first = int(kept.argmax())
    return first if np.isfinite(kept[first]) else NO_TOKEN


def _lines(
    columns: Columns,
    shapers: Sequence[Shaper | None],
    masks: Mapping[int, Bits],
    probes: Mapping[int, Probe],
) -> dict[int, Line]:
    """Draw -> how it is shaped, for draws that are."""
    shaped = {j: shaper for j, shaper in enumerate(shapers) if shaper is not None}
    return {
        j: Line(j, shaped.get(j), int(columns.position[j]), masks.get(j), probes.get(j))
        for j in sorted(shaped.keys() | masks.keys())
    }


def _sample_some(
    logits: Tensor,
    columns: Columns,
    stages: Sequence[Stage],
    lines: list[Line],
    probes: Mapping[int, Probe],
) -> Tensor:
    """A token for each of a few rows, all greedy or none; logits are overwritten."""
    empty = None
    if lines:
        shape(logits.numpy(), lines)
        empty = logits.amax(-1) == -torch.inf
        if empty.any():
            logits[empty] = 0.0  # drawn like any other row, then thrown away
        else:
            empty = None
    if columns.greedy[0]:
        tokens = logits.argmax(-1)
    else:
        kept = run_stages(logits, columns, stages, probes)
        u = torch.from_numpy(uniform(columns.seed, columns.choice, columns.position))
        for i, probe in probes.items():
            probe.note_odds(kept[i])
            probe.uniform = float(u[i])
        tokens = inverse_cdf(kept, u)
    return tokens if empty is None else tokens.masked_fill_(empty, NO_TOKEN)


def run_stages(
    logits: Tensor,
    columns: Columns,
    stages: Sequence[Stage],
    probes: Mapping[int, Probe] | None = None,
) -> Tensor:
    """logits [rows, vocab] float64, overwritten, through every stage that some row uses.

    probes: row -> who is shown what each of its stages leaves.
    """
    for stage in stages:
        used = stage.rows(columns, logits.shape[1])
        if len(used) == logits.shape[0]:
            logits = stage.apply(logits, columns)
        elif used:
            logits[used] = stage.apply(logits[used], columns.take(used))
        for i, probe in (probes or {}).items():
            if i in used:
                probe.note(stage.name, logits[i])
    return logits


def inverse_cdf(logits: Tensor, u: Tensor) -> Tensor:
    """logits [rows, vocab] float64, 0 <= u < 1 [rows] -> the token at u, [rows].

    The first token whose cumulative weight exceeds u times the total: never one of weight 0.
    """
    if logits.shape[0] > _ROWS_AT_ONCE:
        return _inverse_cdf(logits, u)
    # Tokens of weight 0 change no sum: rows with few others need not look at them.
    stay = logits.numpy() > -np.inf
    few = [i for i, row in enumerate(stay) if np.count_nonzero(row) * 4 < row.size]
    if not few:
        return _inverse_cdf(logits, u)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    for i in few:
        ids = torch.from_numpy(np.flatnonzero(stay[i]))
        out[i] = ids[_inverse_cdf(logits[i, ids][None], u[i : i + 1])[0]]
    rest = [i for i in range(len(stay)) if i not in few]
    if rest:
        out[rest] = _inverse_cdf(logits[rest], u[rest])
    return out


def _inverse_cdf(logits: Tensor, u: Tensor) -> Tensor:
    cumulative = (logits - logits.amax(-1, keepdim=True)).exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # u * total may round up to total
    return torch.searchsorted(cumulative, torch.minimum(u[:, None] * total, below), right=True)[
        :, 0
    ]

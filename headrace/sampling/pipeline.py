"""Logits to tokens: stages over the batch, then one draw a row.

A stage is skipped as a whole when no row uses it, and touches only the rows that do: what a row
gets depends on that row alone. Greedy rows are shaped like others, then take the first largest
logit. `reference` has the definition of every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.sampling.history import Ids
from headrace.sampling.params import Columns
from headrace.sampling.probe import Probe
from headrace.sampling.rng import uniform
from headrace.sampling.shaper import Shaper
from headrace.sampling.shaping import Bits, Grid, Line, shape, unpacked
from headrace.sampling.truncation import MinP, Row, TopK, TopNSigma, TopP, TypicalP

Logits = npt.NDArray[np.float32]


class Stage(Protocol):
    """One step between logits and the draw."""

    @property
    def name(self) -> str: ...

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        """The rows that use the stage, ascending."""

    def apply(self, logits: Grid, columns: Columns) -> Grid:
        """New logits [rows, vocab] float64 for these rows and these columns of theirs.

        May overwrite `logits`.
        """


class Temperature:
    """(z - max z) / T: the largest becomes 0, so no T can overflow."""

    name = "temperature"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return list(range(columns.temperature.size))

    def apply(self, logits: Grid, columns: Columns) -> Grid:
        logits -= logits.max(-1, keepdims=True)
        if (columns.temperature != 1.0).any():
            logits /= columns.temperature[:, None]
        return logits


_ROWS_AT_ONCE = 8  # their float64 logits stay in the cache; rows do not touch each other
_STRETCH = 512  # weights

STAGES: tuple[Stage, ...] = (Temperature(), TopNSigma(), TopK(), TopP(), MinP(), TypicalP())
NO_TOKEN = -1


def sample(
    logits: Logits,
    columns: Columns,
    stages: Sequence[Stage] = STAGES,
    best: Ids | None = None,
    shapers: Sequence[Shaper | None] = (),
    masks: Mapping[int, Bits] | None = None,
    probes: Mapping[int, Probe] | None = None,
) -> Ids:
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
    tokens = np.empty(logits.shape[0], np.int64)
    shaped = np.zeros(greedy.size, np.bool_)
    shaped[list(lines)] = True
    still = np.flatnonzero(greedy & ~shaped)
    if still.size:
        tokens[still] = logits[still].argmax(-1) if best is None else best[still]
    for row, line in lines.items():
        if greedy[row] and line.shaper is None and line.bits is not None:
            known = -1 if best is None else int(best[row])
            tokens[row] = _first_allowed(logits[row], line.bits, known)
            shaped[row] = False
            if line.probe is not None:
                allowed = unpacked(line.bits, logits.shape[1])
                line.probe.note("mask", np.where(allowed, logits[row], -np.inf))
    for whose in (greedy & shaped, ~greedy):
        rows = np.flatnonzero(whose)
        for at in range(0, rows.size, _ROWS_AT_ONCE):
            part = rows[at : at + _ROWS_AT_ONCE]
            some = columns.take(part)
            mine = [lines[row]._replace(at=i) for i, row in enumerate(part) if row in lines]
            mine_too = {i: probes[row] for i, row in enumerate(part) if row in probes}
            wide = logits[part].astype(np.float64)
            tokens[part] = _sample_some(wide, some, stages, mine, mine_too)
    return tokens


def _first_allowed(logits: Logits, mask: Bits, likely: int) -> int:
    """The first largest of the tokens that `mask` allows; NO_TOKEN if that leaves none.

    likely: the first largest of all, -1 if it is not known. Most often the mask allows it.
    """
    if likely >= 0 and mask[likely >> 5] >> (likely & 31) & 1:
        return likely
    kept = np.where(unpacked(mask, logits.size), logits, -np.inf)
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
    logits: Grid,
    columns: Columns,
    stages: Sequence[Stage],
    lines: list[Line],
    probes: Mapping[int, Probe],
) -> Ids:
    """A token for each of a few rows, all greedy or none; logits are overwritten."""
    empty = np.zeros(len(logits), np.bool_)
    if lines:
        shape(logits, lines)
        empty = logits.max(-1) == -np.inf
        logits[empty] = 0.0  # drawn like any other row, then thrown away
    if columns.greedy[0]:
        tokens: Ids = logits.argmax(-1)
    else:
        kept = run_stages(logits, columns, stages, probes)
        u = uniform(columns.seed, columns.choice, columns.position)
        for i, probe in probes.items():
            probe.note_odds(kept[i])
            probe.uniform = float(u[i])
        tokens = inverse_cdf(kept, u)
    tokens[empty] = NO_TOKEN
    return tokens


def run_stages(
    logits: Grid,
    columns: Columns,
    stages: Sequence[Stage],
    probes: Mapping[int, Probe] | None = None,
) -> Grid:
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


def inverse_cdf(logits: Grid, u: Row) -> Ids:
    """logits [rows, vocab] float64, 0 <= u < 1 [rows] -> the token at u, [rows].

    The first token whose cumulative weight exceeds u times the total: never one of weight 0.
    """
    if len(logits) > _ROWS_AT_ONCE:
        cumulative = np.exp(logits - logits.max(-1, keepdims=True)).cumsum(-1)
        targets = _target(u, cumulative[:, -1])
        tokens: Ids = np.count_nonzero(cumulative <= targets[:, None], axis=-1)
        return tokens
    return np.array([_token_at(*row) for row in zip(logits, u, strict=True)], np.int64)


def _target(u: Row | np.float64, total: Row | np.float64) -> Any:
    """What a running sum must exceed: u * total may round up to total."""
    return np.minimum(u * total, np.nextafter(total, 0.0))


def _token_at(row: Row, u: np.float64) -> int:
    """The same of one row. A running sum over a vocabulary would take longer than all else, so
    stretches are summed first: the token is another one only where u * total is nearer to a
    boundary than float64 can tell."""
    ids = None
    stay = row > -np.inf
    if np.count_nonzero(stay) * 4 < row.size:  # tokens of weight 0 change no sum
        ids = np.flatnonzero(stay)
        row = row[ids]
    weights = np.exp(row - row.max())
    ends = np.add.reduceat(weights, np.arange(0, weights.size, _STRETCH)).cumsum()
    target = _target(u, ends[-1])
    at = int(np.searchsorted(ends, target, side="right"))
    some = weights[at * _STRETCH : (at + 1) * _STRETCH]
    sums = (ends[at - 1] if at else 0.0) + some.cumsum()
    place = int(np.searchsorted(sums, target, side="right"))
    if place == sums.size:  # the stretch's own sum was rounded up
        place = int(np.flatnonzero(some)[-1])
    place += at * _STRETCH
    return place if ids is None else int(ids[place])

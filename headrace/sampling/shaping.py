"""The stages before temperature, over the rows that use them: rules, penalties, grammar masks.

z [rows, vocab] float64 is changed in place. A stage gathers what all its rows change, then changes
it in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.sampling.history import Ids
from headrace.sampling.shaper import Shaper

if TYPE_CHECKING:  # the fake backend, which has no torch, reads masks with this file
    from headrace.sampling.probe import Probe

Grid = npt.NDArray[np.float64]
Bits = npt.NDArray[np.int32]


class Line(NamedTuple):
    """Row `at` of z: how it is shaped, the position of the token to draw, and its grammar mask."""

    at: int
    shaper: Shaper | None
    position: int
    bits: Bits | None = None  # [ceil(vocab / 32)]: bit t % 32 of word t // 32 = token t is allowed
    probe: Probe | None = None  # is shown what each stage leaves


def shape(z: Grid, lines: Sequence[Line]) -> None:
    """Every stage, in order, for the rows that `lines` name."""
    _bias(z, lines)
    _ban(z, lines)
    probed = [line for line in lines if line.probe is not None]
    _show(z, "rules", [one for one in probed if one.shaper and one.shaper.rules is not None])
    _repetition(z, lines)
    _lz(z, lines)
    _dry(z, lines)
    _show(z, "penalties", [one for one in probed if one.shaper and one.shaper.penalises])
    for line in lines:
        if line.bits is not None:
            z[line.at, ~unpacked(line.bits, z.shape[1])] = -np.inf
    _show(z, "mask", [one for one in probed if one.bits is not None])


def _show(z: Grid, stage: str, lines: Sequence[Line]) -> None:
    for line in lines:
        if line.probe is not None:
            line.probe.note(stage, z[line.at])


def unpacked(bits: Bits, vocab: int) -> npt.NDArray[np.bool_]:
    """[vocab] from bits as `engine.protocol.Masks` has them."""
    octets = np.ascontiguousarray(bits, "<i4").view(np.uint8)
    return np.unpackbits(octets, count=vocab, bitorder="little").view(np.bool_)


Change = tuple[Ids, Ids, Grid]  # rows of z, ids, values


def _at(line: Line, change: tuple[Ids, Grid]) -> Change:
    ids, values = change
    return np.full(ids.size, line.at), ids, values


def _joined(changes: Sequence[Change]) -> Change:
    if len(changes) == 1:
        return changes[0]
    rows, ids, values = (np.concatenate(column) for column in zip(*changes, strict=True))
    return rows, ids, values


def _subtract(z: Grid, changes: Sequence[Change]) -> None:
    if changes:
        rows, ids, values = _joined(changes)
        z[rows, ids] -= values


def _bias(z: Grid, lines: Sequence[Line]) -> None:
    changes = [
        _at(line, (rules.bias_ids, -rules.bias))
        for line in lines
        if line.shaper is not None
        and (rules := line.shaper.rules) is not None
        and rules.bias_ids.size
    ]
    _subtract(z, changes)


def _ban(z: Grid, lines: Sequence[Line]) -> None:
    rows, banned = [], []
    for line in lines:
        if line.shaper is None or line.shaper.rules is None:
            continue
        rules = line.shaper.rules
        if rules.allowed is not None:
            kept = z[line.at, rules.allowed]
            z[line.at] = -np.inf
            z[line.at, rules.allowed] = kept
        ids = rules.banned(line.position, line.shaper.history)
        rows.append(np.full(ids.size, line.at))
        banned.append(ids)
    if rows:
        z[np.concatenate(rows), np.concatenate(banned)] = -np.inf


def _repetition(z: Grid, lines: Sequence[Line]) -> None:
    """z > 0 ? z / r : z * r, then z - (f * count + p * (count > 0)); see `reference.repeated`."""
    changes, numbers = [], []
    for line in lines:
        if line.shaper is None or (how := line.shaper.repetition) is None:
            continue
        change = _at(line, line.shaper.repeated(how, line.position))
        changes.append(change)
        factors = (how.repetition, how.frequency, how.presence)
        numbers.append(np.repeat(np.array([factors]), change[1].size, axis=0))
    if not changes:
        return
    rows, ids, counts = _joined(changes)
    repetition, frequency, presence = np.concatenate(numbers).T
    old = z[rows, ids]
    new = np.where(old > 0, old / repetition, old * repetition)
    z[rows, ids] = new - (frequency * counts + presence * (counts > 0))


def _lz(z: Grid, lines: Sequence[Line]) -> None:
    _subtract(
        z,
        [
            _at(line, line.shaper.compressed(lz, line.position, z.shape[1]))
            for line in lines
            if line.shaper is not None and (lz := line.shaper.lz) is not None
        ],
    )


def _dry(z: Grid, lines: Sequence[Line]) -> None:
    _subtract(
        z,
        [
            _at(line, line.shaper.dried(dry, line.position))
            for line in lines
            if line.shaper is not None and (dry := line.shaper.dry) is not None
        ],
    )

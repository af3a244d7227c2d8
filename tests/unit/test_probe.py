"""The likeliest tokens of a row, as a probe finds them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling.probe import Probe, likeliest


@given(
    size=st.sampled_from([1, 5, 63, 64, 67, 200, 1500]),
    levels=st.integers(1, 40),
    out=st.floats(0, 1),
    count=st.integers(0, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_likeliest_are_those_of_a_stable_sort(
    size: int, levels: int, out: float, count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    row = rng.integers(0, levels, size).astype(np.float64)
    row[rng.random(size) < out] = -np.inf
    count = min(count, int(np.isfinite(row).sum()))
    wanted = np.argsort(-row, kind="stable")[:count]
    assert likeliest(row, count).tolist() == wanted.tolist()


def test_odds_are_of_what_is_left() -> None:
    row = np.full(1000, -np.inf)
    row[[3, 500, 900]] = np.log([0.2, 0.5, 0.3]) + 7.0
    probe = Probe(4, greedy=False)
    probe.note_odds(row)
    (stage,) = probe.tap().stages
    assert (stage.name, stage.kept, stage.ids) == ("softmax", 3, [500, 900, 3])
    assert stage.values == pytest.approx([0.5, 0.3, 0.2])
    assert (probe.tap().draw, probe.tap().uniform) == (4, -1.0)

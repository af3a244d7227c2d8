"""Log-probabilities against a written-out float64 reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.cpu import batch
from headrace.backends.cpu.forward import TorchForward
from headrace.messages import Join, Output, Sampling, StepPlan
from headrace.sampling.logprobs import report
from tests.devices import load
from tests.golden.reference import tiny_model

_VALUES = st.sampled_from([-3.0, -0.5, 0.0, 0.25, 4.0, 80.0, -float("inf")])  # many ties
ROWS = st.lists(
    st.lists(_VALUES | st.floats(-50, 50, width=32), min_size=9, max_size=9).map(
        lambda row: [0.0 if x == -float("inf") and i == 0 else x for i, x in enumerate(row)]
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.data())
def test_equals_the_reference(rows: list[list[float]], data: st.DataObject) -> None:
    """Logprob, rank and the most likely ones; among equals the lowest id comes first."""
    ids = [data.draw(st.integers(0, 8)) for _ in rows]
    counts = [data.draw(st.integers(0, 12)) for _ in rows]
    logits = np.array(rows, np.float32)
    before = logits.copy()
    entries = report(logits, ids, counts)
    assert np.array_equal(logits, before)
    for z, token, count, entry in zip(rows, ids, counts, entries, strict=True):
        norm = max(z) + math.log(math.fsum(math.exp(x - max(z)) for x in z))
        assert math.isclose(entry.logprob, z[token] - norm, abs_tol=1e-6)
        assert entry.rank == 1 + sum(x > z[token] for x in z)
        order = sorted(range(len(z)), key=lambda i: (-z[i], i))[:count]
        assert entry.top_ids == order
        for i, value in zip(order, entry.top, strict=True):
            assert math.isclose(value, z[i] - norm, abs_tol=1e-6)


def test_a_row_is_alone_what_it_is_among_others() -> None:
    """Bit by bit, at a real vocabulary's size."""
    logits = np.random.default_rng(5).normal(0, 4, (11, 50_257)).astype(np.float32)
    ids = list(range(0, 1100, 100))
    together = report(logits, ids, [4] * 11)
    alone = [report(logits[i : i + 1], ids[i : i + 1], [4])[0] for i in range(11)]
    assert together == alone


def test_a_prompt_is_reported_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of prompt x vocabulary: logits are made for a few tokens at a time, same values."""
    vocab, rows = 131, 5
    _, files = tiny_model("llama-gqa", tmp_path)
    prompt = [(i * 7) % vocab for i in range(64)]
    calls: list[int] = []
    again = TorchForward.again

    def counted(self: TorchForward, tokens: Sequence[int]) -> batch.Logits:
        out = again(self, tokens)
        assert out.nbytes <= batch.AGAIN_BYTES
        calls.append(len(tokens))
        return out

    monkeypatch.setattr(TorchForward, "again", counted)
    reports = []
    for limit in (batch.AGAIN_BYTES, 4 * vocab * rows):
        monkeypatch.setattr(batch, "AGAIN_BYTES", limit)
        runner = load("cpu", files, dtype="float32", kv_blocks=16, block_size=8, max_num_seqs=2)
        plan = StepPlan(
            1, [], [Join(0, Sampling(temperature=0.0), 0, [list(range(8))])], [], [[]],
            [0], [0], [64], [prompt], [Output.PROMPT_LOGPROBS], [], [], [], prompts=[(0, 2, 9)],
        )  # fmt: skip
        ticket = runner.launch(plan)
        ticket.finish()
        reports.append(ticket.result().prompt_logprobs[0])
        runner.close()
    assert calls == [64] + [5] * 12 + [4]
    assert len(reports[0]) == 64
    for one, other in zip(*reports, strict=True):
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-5)
        assert one.top_ids == other.top_ids

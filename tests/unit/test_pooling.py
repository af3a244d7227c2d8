"""Requests for a vector through the whole engine, on the fake runner."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from headrace.backends.fake import FakeRunner
from headrace.backends.fake.vectors import LABELS, WIDTH, pooled
from headrace.engine.protocol import Capacity, Runner
from headrace.messages import Grammar, Output, Pool, Pooling, StepPlan, Vector
from tests.unit.engine_rig import Rig

EVERY_LOOP = pytest.mark.parametrize("overlap", [False, True])


def kinds(plan: StepPlan) -> list[str]:
    return [kind for _, kind in plan.pools]


@EVERY_LOOP
@pytest.mark.parametrize("pooling", ["mean", "last", "scores"])
def test_a_vector_and_nothing_else(overlap: bool, pooling: Pooling) -> None:
    rig = Rig(overlap=overlap)
    handle = rig.submit(11, 0, pooling=pooling)
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert len(rig.vectors[0, handle]) == 4 * (LABELS if pooling == "scores" else WIDTH)
    done = rig.dones[0, handle]
    assert (done.error, done.prompt_tokens, done.output_tokens) == ("", 11, 0)
    assert len(rig.plans) == 1
    assert rig.plans[0].draw_into == []
    assert rig.engine.stats().finished["stop"] == 1
    assert rig.engine.stats().generation_tokens == 0


@EVERY_LOOP
def test_chunks_and_neighbours(overlap: bool) -> None:
    """Prompts longer than a step, beside one that decodes all the while."""
    rig = Rig(overlap=overlap, max_num_batched_tokens=8)
    rig.submit(5, 40)
    rig.turn()
    asked: list[Pooling] = ["mean", "last", "mean", "scores"]
    for length, pooling in zip((30, 21, 3, 17), asked, strict=True):
        rig.submit(length, 0, pooling=pooling)
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert len(rig.vectors) == 4
    chunks = [plan for plan in rig.plans if plan.pools]
    assert sum(kinds(plan).count("sum") for plan in chunks) > 4, "a mean comes in chunks"
    ends = [kind for plan in chunks for kind in kinds(plan) if kind != "sum"]
    assert sorted(ends) == ["last", "scores"], "once each"
    for plan in rig.plans:
        assert {i for i, _ in plan.pools}.isdisjoint(plan.draw_from)


def test_a_mean_reads_no_cache_and_fills_it() -> None:
    rig, prompt = Rig(), list(range(12))
    for pooling, cached in (("mean", 0), ("mean", 0), ("last", 12), ("scores", 12)):
        handle = rig.submit(prompt, 0, pooling=pooling)
        rig.run()
        assert rig.dones[0, handle].cached_tokens == cached, pooling
    handle = rig.submit(prompt, 3)
    rig.run()
    assert rig.dones[0, handle].cached_tokens == 12, "tokens read what vectors computed"
    rig.check_tokens()
    rig.check_idle()


@EVERY_LOOP
def test_a_preempted_mean_begins_again(overlap: bool) -> None:
    """An urgent request takes the blocks of a mean that stands in the middle of its prompt."""
    rig = Rig(
        blocks=10,
        overlap=overlap,
        max_num_batched_tokens=8,
        scheduling_policy="priority",
        max_wait_s=1000.0,
    )
    mean = rig.submit(30, 0, pooling="mean", priority=1)
    rig.turn()
    rig.turn()
    rig.submit(20, 4, priority=0)
    rig.run()
    assert rig.dones[0, mean].preemptions == 1
    rig.check_tokens()
    rig.check_idle()


def test_the_longest_prompt() -> None:
    """No token follows a vector, so a prompt may fill the context and the cache."""
    rig = Rig(blocks=8, block_size=4, max_model_len=32)
    fits, over = rig.submit(32, 0, pooling="mean"), rig.submit(33, 0, pooling="mean")
    rig.run()
    assert rig.dones[0, fits].error == ""
    assert rig.dones[0, over].error == "context_length_exceeded"
    rig.check_tokens()
    rig.check_idle()


@EVERY_LOOP
def test_aborted_in_the_middle(overlap: bool) -> None:
    rig = Rig(overlap=overlap, max_num_batched_tokens=8)
    handle = rig.submit(30, 0, pooling="mean")
    rig.turn()
    rig.abort(handle)
    rig.run()
    assert rig.ends[0, handle, 0].reason == "abort"
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"n": 2},
        {"prompt_logprobs": 0},
        {"grammar": Grammar("regex", "a")},
    ],
)
def test_who_asks_for_tokens_too_is_refused(fields: dict[str, object]) -> None:
    rig = Rig()
    asked = {"max_tokens": 0, "pooling": "mean"} | fields
    handle = rig.submit(4, asked.pop("max_tokens"), **asked)  # type: ignore[arg-type]
    rig.run()
    assert rig.dones[0, handle].error == "invalid_request"
    rig.check_idle()


class Other:
    """A runner with another capacity."""

    def __init__(self, inner: FakeRunner, **changes: object) -> None:
        self._inner = inner
        self.capacity: Capacity = msgspec.structs.replace(inner.capacity, **changes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.parametrize(
    ("changes", "pooling", "says"),
    [
        ({"generates": False}, None, "no text"),
        ({"labels": 0}, "scores", "no classification head"),
        ({"width": 0}, "mean", "no embeddings"),
    ],
)
def test_what_a_model_lacks(changes: dict[str, object], pooling: Pooling | None, says: str) -> None:
    def wrap(runner: FakeRunner) -> Runner:
        wrapped: Runner = Other(runner, **changes)  # type: ignore[assignment]
        return wrapped

    rig = Rig(wrap=wrap)
    handle = rig.submit(4, 4 if pooling is None else 0, pooling=pooling)
    rig.run()
    done = rig.dones[0, handle]
    assert done.error == "invalid_request"
    assert says in done.message


def test_a_vector_that_is_not_finite_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = itertools.count()

    def broken(kind: Pool, states: list[int]) -> object:
        vector = pooled(kind, states)
        return vector * np.float32("nan") if next(calls) == 0 else vector

    monkeypatch.setattr("headrace.backends.fake.runner.pooled", broken)
    rig = Rig()
    first, second = rig.submit(4, 0, pooling="mean"), rig.submit(4, 0, pooling="last")
    rig.run()
    assert rig.dones[0, first].error == "request_failed"
    assert (0, first) not in rig.vectors
    assert rig.dones[0, second].error == ""
    rig.check_idle()


def test_messages_travel() -> None:
    """The structs that cross queues survive msgpack."""
    rig = Rig()
    rig.submit(4, 0, pooling="last")
    out = rig.turn()[0]
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=type(out))
    assert packed.vectors == [Vector(1, rig.vectors[0, 1])]
    plan = rig.plans[0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    assert plan.outputs == [Output.POOL]

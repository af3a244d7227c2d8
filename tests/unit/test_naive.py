"""The naive engine's bookkeeping, with a `generate` that the test controls."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.bench.naive import NaiveEngine, refuse
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.messages import (
    Abort,
    Done,
    Dry,
    End,
    Finish,
    Grammar,
    Lz,
    Repetition,
    Rules,
    Sampling,
    Submit,
)

STOP = 9


class Generator:
    """Draws `token(prompt, choice, position)`, when `paced` one for each `allow`."""

    def __init__(self, paced: bool = False) -> None:
        self.paced = paced
        self.tickets: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.calls: list[tuple[list[int], int]] = []

    def allow(self, tokens: int) -> None:
        for _ in range(tokens):
            self.tickets.put(None)

    def __call__(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Any,
        choice: int,
        stop_ids: list[int],
        on_token: Callable[[int], None],
    ) -> None:
        self.calls.append((prompt, choice))
        if prompt == [66]:
            raise RuntimeError("no luck")
        for position in range(max_tokens):
            if self.paced:
                self.tickets.get(timeout=30)
            token = self.token(prompt, choice, position)
            on_token(token)
            if token in stop_ids or prompt == [67]:
                return

    @staticmethod
    def token(prompt: list[int], choice: int, position: int) -> int:
        return STOP if prompt[0] == 8 and position == 2 else (prompt[0] + choice + position) % 8


class Client:
    """Collects what the engine says, by (owner, handle)."""

    def __init__(self, engine: NaiveEngine) -> None:
        self.engine = engine
        self.tokens: dict[tuple[int, int, int], list[int]] = {}
        self.ends: dict[tuple[int, int, int], End] = {}
        self.dones: dict[tuple[int, int], Done] = {}

    def turn(self) -> None:
        for owner, out in self.engine.turn().items():
            for handle, choice, token in zip(out.handles, out.choices, out.tokens, strict=True):
                self.tokens.setdefault((owner, handle, choice), []).append(token)
            for end in out.ends:
                assert (owner, end.handle, end.choice) not in self.ends, "two ends for a choice"
                self.ends[owner, end.handle, end.choice] = end
            for done in out.dones:
                assert (owner, done.handle) not in self.dones, "two dones for a request"
                self.dones[owner, done.handle] = done

    def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(2000):
            if condition():
                return
            self.turn()
        raise AssertionError("it never came")

    def drain(self) -> None:
        self.until(lambda: not self.engine.has_work)
        assert self.engine.turn() == {}


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[Client, Generator]]]:
    engines = []

    def make(paced: bool = False, **settings: Any) -> tuple[Client, Generator]:
        generator = Generator(paced)
        engine = NaiveEngine(Settings(**settings), generator, max_model_len=64, vocab_size=100)
        engines.append((engine, generator))
        return Client(engine), generator

    yield make
    for engine, generator in engines:
        generator.paced = False
        generator.allow(1)
        engine.close()
        stats = engine.stats()
        assert stats.started == sum(stats.finished.values())
        assert (stats.running, stats.waiting) == (0, 0)


def test_requests_run_in_order_and_to_their_ends(made: Any) -> None:
    client, generator = made()
    client.engine.submit(1, Submit(5, [1, 2], 4))
    client.engine.submit(2, Submit(5, [8], 10, stop_ids=[STOP]))
    client.engine.submit(1, Submit(6, [3], 2, n=3))
    assert client.engine.has_work
    client.drain()
    assert client.tokens[1, 5, 0] == [1, 2, 3, 4]
    assert client.ends[1, 5, 0].reason == "length"
    assert client.tokens[2, 5, 0] == [0, 1, STOP]
    assert client.ends[2, 5, 0] == End(5, 0, "stop", STOP)
    assert [client.tokens[1, 6, c] for c in range(3)] == [[3, 4], [4, 5], [5, 6]]
    assert [c for _, c in generator.calls] == [0, 0, 0, 1, 2]
    done = client.dones[1, 6]
    assert (done.prompt_tokens, done.output_tokens, done.error) == (1, 6, "")
    stats = client.engine.stats()
    assert stats.finished == {"length": 2, "stop": 1}
    assert (stats.generation_tokens, stats.prompt_tokens) == (13, 4)


def test_where_no_token_is_asked_for_nothing_is_generated(made: Any) -> None:
    client, generator = made()
    client.engine.submit(1, Submit(5, [1] * 64, 0, n=2))
    client.drain()
    assert (client.tokens, generator.calls) == ({}, [])
    assert [client.ends[1, 5, choice].reason for choice in range(2)] == ["length"] * 2
    assert client.dones[1, 5].output_tokens == 0


def test_tokens_come_one_by_one(made: Any) -> None:
    client, generator = made(paced=True)
    client.engine.submit(1, Submit(1, [1], 3))
    client.turn()
    assert client.tokens == {}
    for count in (1, 2, 3):
        generator.allow(1)
        client.until(lambda count=count: len(client.tokens.get((1, 1, 0), [])) == count)
    client.drain()
    assert client.dones[1, 1].output_tokens == 3


def test_one_at_a_time(made: Any) -> None:
    client, generator = made(paced=True)
    for handle in range(4):
        client.engine.submit(1, Submit(handle, [handle], 2))
    generator.allow(1)
    client.until(lambda: client.tokens)
    stats = client.engine.stats()
    assert (stats.running, stats.waiting) == (1, 3)
    assert len(generator.calls) == 1
    generator.allow(7)
    client.drain()
    assert len(generator.calls) == 4


@pytest.mark.parametrize("running", [True, False])
def test_abort(made: Any, running: bool) -> None:
    client, generator = made(paced=True)
    client.engine.submit(1, Submit(1, [1], 30, n=2))
    client.engine.submit(1, Submit(2, [2], 2))
    generator.allow(1)
    client.until(lambda: client.tokens)
    target = 1 if running else 2
    client.engine.abort(1, Abort(target))
    client.engine.abort(1, Abort(99))  # unknown: ignored
    client.turn()
    assert client.dones[1, target].error == ""
    assert client.ends[1, target, 0].reason == "abort"
    sent = dict(client.tokens)
    generator.allow(60 if not running else 3)
    client.drain()
    other = 3 - target
    assert client.ends[1, other, 0].reason == "length"
    assert client.tokens.get((1, target, 0)) == sent.get((1, target, 0))
    assert client.engine.stats().finished == {"abort": 1, "length": 1}


def test_finish_at_a_stop_string(made: Any) -> None:
    client, generator = made(paced=True)
    client.engine.submit(1, Submit(1, [1], 30, n=2))
    generator.allow(4)
    client.until(lambda: len(client.tokens.get((1, 1, 0), [])) == 4)
    client.engine.finish(1, Finish(1, 0, 3))
    client.engine.finish(1, Finish(1, 0, 2))  # it has ended: ignored
    generator.allow(1 + 30)  # one token of overrun, then the other choice
    client.drain()
    assert client.ends[1, 1, 0] == End(1, 0, "stop")
    assert len(client.tokens[1, 1, 0]) == 4
    assert client.ends[1, 1, 1].reason == "length"
    assert client.dones[1, 1].output_tokens == 33


def test_an_owner_that_is_gone_hears_nothing(made: Any) -> None:
    client, generator = made(paced=True)
    client.engine.submit(1, Submit(1, [1], 5))
    client.engine.submit(2, Submit(1, [2], 2))
    generator.allow(1)
    client.until(lambda: client.tokens)
    client.engine.drop_owner(1)
    generator.allow(3)
    client.drain()
    assert (1, 1) not in client.dones
    assert client.dones[2, 1].output_tokens == 2


def test_a_failure_ends_its_request_alone(made: Any) -> None:
    client, _ = made()
    client.engine.submit(1, Submit(1, [66], 5))
    client.engine.submit(1, Submit(2, [67], 5))  # generate() that returns too early
    client.engine.submit(1, Submit(3, [3], 2))
    client.drain()
    assert client.dones[1, 1].error == client.dones[1, 2].error == "request_failed"
    assert "no luck" in client.dones[1, 1].message
    assert client.ends[1, 1, 0].reason == "error"
    assert client.dones[1, 3].error == ""


def test_refusals(made: Any) -> None:
    client, generator = made(paced=True, max_queue=1)
    client.engine.submit(1, Submit(1, [1], 2))
    for submit, code in [
        (Submit(2, [1] * 60, 5), "context_length_exceeded"),
        (Submit(3, [], 5), "invalid_request"),
        (Submit(4, [100], 5), "invalid_request"),
        (Submit(5, [1], 5, adapter="x"), "invalid_request"),
    ]:
        client.engine.submit(1, submit)
        client.turn()
        assert client.dones[1, submit.handle].error == code
    client.engine.submit(1, Submit(6, [1], 2))
    client.engine.submit(1, Submit(7, [1], 2))
    client.turn()
    assert client.dones[1, 7].error == "queue_full"
    generator.allow(4)
    client.drain()
    assert client.dones[1, 6].error == client.dones[1, 1].error == ""
    assert client.engine.stats().finished["refused"] == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": Sampling(rules=Rules(bias=[(1, 2.0)]))},
        {"sampling": Sampling(repetition=Repetition(frequency=0.5))},
        {"sampling": Sampling(repetition=Repetition(1.1, window=5))},
        {"sampling": Sampling(dry=Dry(0.8))},
        {"sampling": Sampling(lz=Lz(0.15))},
        {"sampling": Sampling(top_n_sigma=1.0)},
        {"sampling": Sampling(logprobs=0)},
        {"prompt_logprobs": 1},
        {"grammar": Grammar("regex", "a")},
    ],
)
def test_sampling_that_generate_cannot_do_is_refused(made: Any, fields: dict[str, Any]) -> None:
    client, _ = made()
    client.engine.submit(1, Submit(1, [1], 2, **fields))
    client.engine.submit(1, Submit(2, [1], 2, sampling=Sampling(repetition=Repetition(1.1))))
    client.drain()
    assert client.dones[1, 1].error == "invalid_request"
    assert "the naive engine has no" in client.dones[1, 1].message
    assert client.dones[1, 2].error == ""


def test_a_handle_in_use_is_refused_and_its_first_request_goes_on(made: Any) -> None:
    client, generator = made(paced=True)
    client.engine.submit(1, Submit(1, [1], 2))
    client.engine.submit(1, Submit(1, [5], 2))
    (out,) = client.engine.turn().values()
    assert out.dones[0].error == "invalid_request"
    generator.allow(2)
    client.drain()
    assert client.tokens[1, 1, 0] == [1, 2]
    assert client.dones[1, 1].error == ""


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_blocks": 5},
        {"scheduling_policy": "static"},
        {"load_format": "dummy"},
        {"overlap": "on"},
        {"cpu_kernels": "torch"},
        {"cpu_precision": "exact"},
        {"prefix_caching": False},
        {"kv_events_endpoint": "tcp://*:5557"},  # /v1/models would name it, and nobody publish
    ],
)
def test_settings_that_it_would_have_to_ignore(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        refuse(Settings(**settings))
    refuse(Settings(backend="cpu", engine="naive"))

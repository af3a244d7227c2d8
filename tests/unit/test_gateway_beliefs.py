"""What a worker is thought to hold: of prompts on their way, and behind those that wait there."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from headrace.gateway.beliefs import Beliefs, Expected, cache_tokens
from headrace.gateway.event_feed import Feed
from headrace.gateway.load import Lease
from headrace.gateway.prefix_index import PrefixIndex
from headrace.gateway.prompt import Prompt, PromptReader
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.worker import Worker


def test_what_was_computed_is_expected_no_longer_than_its_events_take() -> None:
    expected = Expected()
    expected.add_worker("w")
    expected.expect("w", [1, 2, 3], 5.0)
    expected.expect("w", [1, 2, 4], 7.0)
    expected.come("w", [1, 2, 3], 5.0, 1.0)
    expected.sweep(0.9)
    assert expected.match([1, 2, 3], ["w"]) == (3,)
    expected.sweep(1.0)
    assert expected.match([1, 2, 3], ["w"]) == (2,), "the other one is still to come"
    assert expected.blocks("w") == 3, "1, 2 and 4"
    expected.come("w", [1, 2, 4], 7.0, 8.0)
    expected.sweep(7.0)
    assert expected.match([1, 2, 4], ["w"]) == (0,), "no call makes it later"
    expected.expect("w", [9], 9.0)
    expected.clear("w")
    assert expected.blocks("w") == 0
    expected.come("w", [9], 9.0, 8.5)
    assert expected.match([9], ["w"]) == (0,)
    expected.remove_worker("w")
    expected.come("w", [9], 9.0, 8.5)
    expected.sweep(10.0)


class Line:
    """A subscription without sockets."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed


OLD = list(range(320))


def prompt(ids: list[int]) -> Prompt:
    body = msgspec.json.encode({"model": "m", "prompt": ids})
    return PromptReader(False).read("/v1/completions", body, {})


def one_worker(kv_tokens: object) -> tuple[Beliefs, PrefixIndex, Worker]:
    """Its events say that it holds OLD, five blocks of 64 tokens."""
    history = PrefixIndex(2**20)
    worker = Worker(WorkerSpec(url="http://w", models=("m",)), GatewaySettings())
    worker.cards["m"] = {"kv_tokens": kv_tokens}
    beliefs = Beliefs(GatewaySettings(), history)
    beliefs.add_worker(worker.name)
    history.add_worker(worker.name)
    feed = Feed(beliefs.blocks, worker.name, replays=False, now_s=0.0)
    stored: list[Any] = ["BlockStored", [1, 2, 3, 4, 5], None, OLD, 64, None, "GPU"]
    feed.live(0, msgspec.msgpack.encode([1.0, [stored], 0]), 0.0)
    beliefs._followed[worker.name] = Line(feed)  # type: ignore[assignment]
    return beliefs, history, worker


def test_what_did_not_come_in_time_counts_no_more() -> None:
    """Also where nothing was placed and no second passed since."""
    beliefs, _, worker = one_worker(0)
    late = prompt(list(range(1000, 1128)))
    beliefs.placed(late, worker, time.monotonic() - 60.0, 5.0)
    assert beliefs.cached(late, [worker]) == ((0,), ("exact",))
    soon = prompt(list(range(2000, 2128)))
    beliefs.placed(soon, worker, time.monotonic(), 5.0)
    assert beliefs.cached(soon, [worker]) == ((128,), ("exact",))


@pytest.mark.parametrize("said", [0, 512, "many"])
def test_what_waits_at_a_worker_drops_what_it_holds_now(said: object) -> None:
    """A cache of 512 tokens: what events say is held now is gone when the prompts before this one
    are computed, unless one of them has it too. Of a cache of unknown size events alone count."""
    beliefs, history, worker = one_worker(said)
    size = cache_tokens(worker, "m")
    assert size == (512 if said == 512 else 0)
    history.set_capacity(worker.name, size // 64)

    def thought(ids: list[int]) -> int:
        (tokens,), (state,) = beliefs.cached(prompt(ids), [worker])
        assert state == "exact"
        return tokens

    old = OLD
    history.insert(prompt(old).chain, worker.name)
    assert thought([*old, 1, 2]) == 320
    waits = [old[:64] + list(range(1000 * n, 1000 * n + 192)) for n in (1, 2, 3)]
    for ids in waits:
        history.insert(prompt(ids).chain, worker.name)
    lease = Lease(worker, 600, 600, 1, 0.0)
    assert thought([*old, 1, 2]) == (128 if said == 512 else 320), "what is asked for again stays"
    lease.begin(1.0)
    assert thought([*old, 1, 2]) == 320, "nothing waits: events know"

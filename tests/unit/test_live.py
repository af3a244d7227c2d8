"""What the live page is told of the engine, from views that a double gives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.api import live as module
from headrace.api.live import Live
from headrace.errors import EngineDead, NotReady
from headrace.messages import EngineInfo, StepView, View


class Engine:
    """Answers as `EngineClient` does; `views` in turn, or nothing where there are none."""

    def __init__(self, *views: View) -> None:
        self.views = list(views)
        self.asked: list[bool] = []
        self.on_view: Callable[[View], None] | None = None
        self.dead = False
        self.engine_pid = os.getpid()
        self.info = EngineInfo(100, 4, 259, 16, 8, ledger=[("weights", 1000)])

    def require(self) -> EngineInfo:
        if self.dead:
            raise EngineDead("gone")
        return self.info

    def look(self, *, states: bool = False) -> None:
        self.asked.append(states)
        if self.views and self.on_view is not None:
            asyncio.get_running_loop().call_soon(self.on_view, self.views.pop(0))


def view(time_s: float, tokens: int = 0, states: bytes = b"") -> View:
    step = StepView(7, time_s - 0.01, time_s, 0.008, 1, 3, 1, [5, 6], [4, 0], [1, 9], [1, 0])
    return View(time_s, 2, 1, 8, 3, 2, 16, 40, tokens, 2 * tokens, [step], states)


def live_of(engine: Engine) -> Live:
    return Live(engine, lambda name: None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.001)


async def test_events_have_rates_and_steps_and_end_when_told() -> None:
    engine = Engine(view(10.0), view(10.5, tokens=50), view(11.0))
    told: list[dict[str, Any]] = []
    async for event in live_of(engine).events(lambda: len(told) == 2):
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        told.append(msgspec.json.decode(event[6:]))
    first, second = told
    assert first["tokens_per_s"] is None
    assert (second["tokens_per_s"], second["prefill_tokens_per_s"]) == (100.0, 200.0)
    assert second["steps_per_s"] == 0.0
    assert second["kv"] == {"blocks": 8, "used": 3, "cached": 2, "block_size": 16}
    assert (second["running"], second["waiting"]) == (2, 1)
    assert second["ledger"] == [{"name": "weights", "bytes": 1000}]
    (step,) = second["last_steps"]
    assert (step["start_ms"], step["ms"], step["device_ms"]) == (-10.0, 10.0, 8.0)
    assert (step["tokens"], step["prefill_tokens"]) == (10, 9)
    assert [row["kind"] for row in step["rows"]] == ["decode", "prefill"]
    assert not any(row["mine"] for row in step["rows"])


async def test_an_engine_that_is_gone_may_come_back() -> None:
    engine = Engine(view(1.0))
    engine.dead = True
    rounds = 0

    def stopped() -> bool:
        nonlocal rounds
        rounds += 1
        engine.dead = rounds < 4
        return rounds == 6

    events = [event async for event in live_of(engine).events(stopped)]
    assert len(events) == 1


async def test_who_wants_blocks_does_not_get_anothers_answer() -> None:
    engine = Engine()
    live = live_of(engine)
    wants, other = asyncio.create_task(live.view(states=True)), asyncio.create_task(live.view())
    await asyncio.sleep(0)
    assert engine.asked == [True, False]
    assert engine.on_view is not None
    engine.on_view(view(1.0))
    assert (await other).time_s == 1.0
    assert not wants.done()
    engine.on_view(view(2.0, states=bytes(8)))
    assert (await wants).states == bytes(8)


@pytest.mark.parametrize("states", [False, True])
async def test_many_who_look_at_once_ask_the_engine_once(
    states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    live = live_of(engine)
    many = [asyncio.create_task(live.view(states=states)) for _ in range(100)]
    await asyncio.sleep(0)
    assert engine.asked == [states]
    monkeypatch.setattr(module, "LOST_S", -1.0)  # it is taken for lost
    many.append(asyncio.create_task(live.view(states=states)))
    await asyncio.sleep(0)
    assert engine.asked == [states, states]
    assert engine.on_view is not None
    engine.on_view(view(1.0, states=bytes(8)))
    assert {seen.time_s for seen in await asyncio.gather(*many)} == {1.0}
    many = [asyncio.create_task(live.view(states=states))]
    await asyncio.sleep(0)
    assert len(engine.asked) == 3, "an answer that has come is not given to who asks later"
    engine.on_view(view(2.0, states=bytes(8)))
    assert (await many[0]).time_s == 2.0


async def test_all_watchers_get_the_same_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 1000.0)
    engine = Engine(view(1.0))
    live = live_of(engine)
    streams = [live.events(lambda: False) for _ in range(20)]
    events = await asyncio.gather(*(anext(stream) for stream in streams))
    assert engine.asked == [False]
    assert len(set(events)) == 1
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_an_engine_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    with pytest.raises(NotReady):
        await live_of(Engine()).view()

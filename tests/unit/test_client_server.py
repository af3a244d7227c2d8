"""The process boundary over real ZMQ sockets: engine server in a thread, clients on this loop."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from headrace.config import Settings
from headrace.engine import client as client_module
from headrace.engine import server as server_module
from headrace.engine.client import EngineClient, Job
from headrace.engine.loop import Engine
from headrace.engine.server import Post, Stopper, run
from headrace.engine.sockets import INBOX, PULSE
from headrace.engine.token_stream import Delta, TokenStream
from headrace.errors import EngineDead, NotReady, RequestFailed
from headrace.messages import Abort, Beat, Done, EngineInfo, Finish, Pulse, Submit, TokenOut
from tests.unit.engine_double import ScriptedEngine

INFO = EngineInfo(4096, 64, 259, 16, 100)
PATIENCE_S = 30.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hr") as name:  # short: ipc paths have a limit
        yield Path(name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machinery with shorter periods."""
    monkeypatch.setattr(client_module, "BEAT_S", 0.05)
    monkeypatch.setattr(client_module, "TICK_S", 0.02)
    monkeypatch.setattr(server_module, "PULSE_S", 0.05)
    monkeypatch.setattr(server_module, "IDLE_POLL_MS", 50)


class Running:
    """An engine server in a thread."""

    def __init__(
        self,
        folder: Path,
        engine: ScriptedEngine,
        *,
        loaded: threading.Event | None = None,
        api_timeout_s: float = 10.0,
    ) -> None:
        self.stopper = Stopper()
        self.registry = CollectorRegistry()
        settings = msgspec.structs.replace(Settings(), api_timeout_s=api_timeout_s)

        def build(say: Callable[[str], None]) -> tuple[Engine, EngineInfo]:
            say("reading weights")
            if loaded is not None:
                loaded.wait(PATIENCE_S)
            return cast(Engine, engine), INFO

        self.thread = threading.Thread(
            target=run, args=(self.stopper, folder, settings, build, self.registry)
        )
        self.thread.start()

    def stop(self) -> None:
        self.stopper.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.stopper.close()

    def shown(self, name: str, **labels: str) -> float:
        """A metric, as a page would say it now."""
        value = self.registry.get_sample_value(name, {"model_name": "default", **labels})
        assert value is not None, name
        return value

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


@asynccontextmanager
async def connected(
    folder: Path, worker: int = 0, *, engine_timeout_s: float = 10.0, ready: bool = True
) -> AsyncIterator[EngineClient]:
    client = EngineClient(folder, worker, engine_timeout_s=engine_timeout_s)
    await client.start()
    try:
        if ready:
            await until(lambda: client.state == "ready")
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        await asyncio.sleep(0.01)


async def collect(stream: TokenStream) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async with stream:
        while not stream.done:
            for delta in await stream.take():
                tokens.setdefault(delta.index, []).extend(delta.tokens)
    return tokens


async def test_choices_and_prompts_come_back_by_index(folder: Path) -> None:
    ended: list[Done] = []
    with Running(folder, ScriptedEngine()):
        async with connected(folder) as client:
            client.on_done = lambda stream, done: ended.append(done)
            assert client.info == INFO
            stream = client.submit([Job([1], 3, n=2), Job([1, 2], 4, n=2)])
            assert await collect(stream) == {
                0: [97, 98, 99],
                1: [97, 98, 99],
                2: [97, 98, 99, 100],
                3: [97, 98, 99, 100],
            }
    assert [done.output_tokens for done in ended] == [6, 8]


async def test_where_nothing_is_drawn_the_end_is_the_first_that_is_heard(folder: Path) -> None:
    """As of a limit on the time until then, and of what is measured."""
    with Running(folder, ScriptedEngine()):
        async with connected(folder) as client:
            stream = client.submit([Job([1], 0, n=2), Job([1, 2], 0, n=2)])
            assert await collect(stream) == {0: [], 1: [], 2: [], 3: []}
            assert stream.arrived_s < stream.first_token_s <= stream.last_token_s
            given_up = client.submit([Job([1], 9)])
            given_up.abort()
            await until(lambda: not given_up._live)
            assert given_up.first_token_s == 0


async def test_a_lagging_consumer_gets_merged_deltas(folder: Path) -> None:
    with Running(folder, ScriptedEngine()):
        async with connected(folder) as client, client.submit([Job([1], 50)]) as stream:
            await until(lambda: stream._live == 0)
            deltas = await stream.take()
            assert len(deltas) == 1
            assert len(deltas[0].tokens) == 50
            assert deltas[0].end is not None
            assert stream.done


async def test_leaving_aborts_and_is_counted(folder: Path) -> None:
    engine = ScriptedEngine(pause_s=0.001)
    ended: list[Done] = []
    with Running(folder, engine):
        async with connected(folder) as client:
            client.on_done = lambda stream, done: ended.append(done)
            async with client.submit([Job([1], 1_000_000), Job([2], 1_000_000)]) as stream:
                await stream.take()
            await until(lambda: len(ended) == 2 and not engine.live)
    assert sum(isinstance(message, Abort) for _, message in engine.messages) == 2


async def test_finish_ends_one_choice(folder: Path) -> None:
    engine = ScriptedEngine(pause_s=0.001)
    with Running(folder, engine):
        async with connected(folder) as client, client.submit([Job([1], 100_000, n=2)]) as stream:
            stream.finish(1, 2)
            ends: list[Delta] = []
            while not ends:
                ends = [delta for delta in await stream.take() if delta.end is not None]
            assert ends[0].index == 1
    assert any(message == Finish(1, 1, 2) for _, message in engine.messages)


async def test_a_turn_waits_for_arrivals_while_the_device_is_busy(folder: Path) -> None:
    """All that come until then are in it."""
    engine = ScriptedEngine()
    steps_before: list[int] = []  # turns made when the engine heard of a request

    def busy_until_three_are_there() -> float:
        return PATIENCE_S if 0 < len(engine.messages) < 3 and engine.steps else 0.0

    submit = engine.submit

    def noted(owner: int, msg: Submit) -> None:
        steps_before.append(engine.steps)
        submit(owner, msg)

    with Running(folder, engine):
        async with connected(folder) as client:
            engine.submit, engine.wait = noted, busy_until_three_are_there  # type: ignore[method-assign]
            first = client.submit([Job([1], 50)])
            await first.take()
            second = client.submit([Job([2], 5)])
            await until(lambda: len(engine.messages) == 2)
            third = client.submit([Job([3], 5)])
            await asyncio.gather(*map(collect, (first, second, third)))
    assert steps_before == [0, 1, 1], "one turn before them, and they are in the next"


async def test_an_engine_without_work_does_what_it_put_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece after another; a request that comes meanwhile waits for one of them."""
    engine = ScriptedEngine()
    began = threading.Event()
    posts: list[Post] = []

    class Noted(Post):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            posts.append(self)

    monkeypatch.setattr(server_module, "Post", Noted)
    monkeypatch.setattr(client_module, "BEAT_S", PATIENCE_S)  # what comes is a request

    def piece() -> None:
        """Lasts until something has come, if it is the first."""
        if not began.is_set():
            began.set()
            assert posts[0].socket.poll(int(PATIENCE_S * 1e3))

    with Running(folder, engine):
        async with connected(folder) as client:
            left: list[int] = []
            submit = engine.submit

            def noted(owner: int, msg: Submit) -> None:
                left.append(engine.put_off)
                submit(owner, msg)

            engine.submit = noted  # type: ignore[method-assign]
            engine.on_idle, engine.put_off = piece, 3
            await until(began.is_set)
            # Arrives while the first piece is done.
            assert await collect(client.submit([Job([1], 2)])) == {0: [97, 98]}
            assert left == [2], "no other piece comes before it"
            await until(lambda: engine.put_off == 0)
            assert await collect(client.submit([Job([1], 2)])) == {0: [97, 98]}


class Overlapping(ScriptedEngine):
    """A step is in flight when the last request has ended; it lands when `landed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.landed = threading.Event()
        self.in_flight = False

    @property
    def has_work(self) -> bool:
        return super().has_work or self.in_flight

    def turn(self) -> dict[int, TokenOut]:
        if self.in_flight and not self.live:
            assert self.landed.wait(PATIENCE_S)
        self.in_flight = bool(self.live)
        return super().turn()


async def test_a_page_that_shows_nothing_running_has_counted_who_was_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon a request follows on another, and while a step of it is still in flight."""
    monkeypatch.setattr(server_module, "METRICS_S", 600.0)
    engine = Overlapping()
    with Running(folder, engine) as running:
        async with connected(folder) as client:
            for steps in (2, 4, 6):
                engine.landed.clear()
                assert await collect(client.submit([Job([1], 2)])) == {0: [97, 98]}
                idle = running.shown("headrace_requests_running") == 0
                counted = running.shown("headrace_steps_total") == steps
                engine.landed.set()
                assert counted or not idle
                await until(lambda: not engine.has_work)


async def test_nothing_is_taken_while_the_model_loads(folder: Path) -> None:
    loaded = threading.Event()
    with Running(folder, ScriptedEngine(), loaded=loaded):
        async with connected(folder, ready=False) as client:
            await until(lambda: client.phase == "reading weights")
            assert (client.state, client.alive, client.info) == ("loading", True, None)
            with pytest.raises(NotReady, match="reading weights"):
                client.submit([Job([1], 1)])
            loaded.set()
            await until(lambda: client.state == "ready")
            assert await collect(client.submit([Job([1], 2)])) == {0: [97, 98]}


async def test_a_long_step_neither_stops_the_pulse_nor_drops_anyone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both limits are longer than the gaps between beats and pulses, and shorter than a step.
    monkeypatch.setattr(client_module, "FRESH_S", 1.5)
    engine = ScriptedEngine(pause_s=2.0)
    with Running(folder, engine, api_timeout_s=1.5):
        async with connected(folder) as client:
            states = set()
            task = asyncio.create_task(collect(client.submit([Job([1], 2)])))
            while not task.done():
                states.add(client.state)
                await asyncio.sleep(0.02)
            assert task.result() == {0: [97, 98]}
            assert states == {"ready"}
    assert not engine.drops


async def test_a_silent_process_is_dropped_and_told_so(folder: Path) -> None:
    engine = ScriptedEngine(pause_s=0.001)
    with Running(folder, engine, api_timeout_s=1.0):
        async with connected(folder) as client:
            stream = client.submit([Job([1], 1_000_000)])
            await stream.take()
            assert client._tick_task is not None
            client._tick_task.cancel()  # as if the process had been stopped
            await until(lambda: bool(engine.drops) and not engine.live)
            client._tick_task = asyncio.create_task(client._tick())
            with pytest.raises(RequestFailed, match="silent"):
                await collect(stream)
            assert await collect(client.submit([Job([1], 2)])) == {0: [97, 98]}


async def test_a_new_start_of_a_worker_drops_the_old_one(folder: Path) -> None:
    engine = ScriptedEngine(pause_s=0.001)
    with Running(folder, engine):
        async with connected(folder, worker=0) as old, connected(folder, worker=1) as other:
            old_stream = old.submit([Job([1], 1_000_000)])
            other_stream = other.submit([Job([1], 1_000_000)])
            await old_stream.take()
            await other_stream.take()
            async with connected(folder, worker=0) as new:
                await until(lambda: len(engine.live) == 1)
                assert len(engine.drops) == 1
                assert await collect(new.submit([Job([1], 2)])) == {0: [97, 98]}
                await other_stream.take()


async def test_a_process_that_reads_nothing_holds_nobody_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SEND_QUEUE", 4)
    engine = ScriptedEngine(tokens_a_turn=2000)
    with Running(folder, engine):
        context = zmq.Context()
        stuck = context.socket(zmq.DEALER)
        stuck.setsockopt(zmq.IDENTITY, b"7.1.stuck")
        stuck.setsockopt(zmq.RCVHWM, 1)
        stuck.connect(f"ipc://{folder / INBOX}")
        encode = msgspec.msgpack.encode
        stuck.send(encode(Submit(1, [1], 1_000_000_000)))
        await until(lambda: bool(engine.drops))
        async with connected(folder) as client:
            assert len((await collect(client.submit([Job([1], 5000)])))[0]) == 5000
        stuck.close(linger=0)
        context.term()


async def test_bytes_that_are_no_message_change_nothing(folder: Path) -> None:
    with Running(folder, ScriptedEngine()):
        async with connected(folder) as client:
            client._dealer.send(b"\xc1 not msgpack")
            client._dealer.send(msgspec.msgpack.encode(["submit", "x"]))
            assert await collect(client.submit([Job([1], 2)])) == {0: [97, 98]}


async def test_a_dead_engine_fails_streams_and_refuses_new_ones(folder: Path) -> None:
    running = Running(folder, ScriptedEngine(pause_s=0.001))
    async with connected(folder, engine_timeout_s=1.5) as client:
        stream = client.submit([Job([1], 1_000_000)])
        await stream.take()
        running.stop()
        with pytest.raises(EngineDead):
            await collect(stream)
        assert client.state == "dead"
        assert not client.alive
        with pytest.raises(EngineDead):
            client.submit([Job([1], 1)])
        with Running(folder, ScriptedEngine()):
            await until(lambda: client.state == "ready")
            assert await collect(client.submit([Job([1], 2)])) == {0: [97, 98]}


async def test_a_pulse_with_a_new_pid_fails_old_streams(folder: Path) -> None:
    context = zmq.Context()
    router, pub = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    router.bind(f"ipc://{folder / INBOX}")
    pub.bind(f"ipc://{folder / PULSE}")

    def pulse(pid: int) -> None:
        pub.send(msgspec.msgpack.encode(Pulse(pid, INFO, "ready", 0)))

    async def pulses(pid: int, condition: Callable[[], bool]) -> None:
        while not condition():
            pulse(pid)
            await asyncio.sleep(0.02)

    try:
        async with connected(folder, ready=False) as client:
            await pulses(1, lambda: client.state == "ready")
            stream = client.submit([Job([1], 5)])
            waiting = asyncio.create_task(stream.take())
            await pulses(2, waiting.done)
            with pytest.raises(EngineDead, match="started again"):
                await waiting
            messages: list[object] = []
            while not any(isinstance(message, Abort) for message in messages):
                payload = router.recv_multipart()[1]
                messages.append(
                    msgspec.msgpack.decode(payload, type=Submit | Abort | Finish | Beat)
                )
            await collect_nothing(client)
    finally:
        context.destroy(linger=0)


async def collect_nothing(client: EngineClient) -> None:
    """A stream opened after the restart is not touched by it."""
    async with client.submit([Job([1], 5)]) as stream:
        await asyncio.sleep(0.1)
        stream.nudge()
        assert await stream.take() == []


async def test_idle_costs_no_turns(folder: Path) -> None:
    engine = ScriptedEngine()
    with Running(folder, engine):
        async with connected(folder) as client:
            await collect(client.submit([Job([1], 3)]))
            before = engine.steps
            await asyncio.sleep(0.3)
            assert engine.steps == before
    assert engine.closed


async def test_stop_wakes_an_idle_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "IDLE_POLL_MS", 600_000)
    with Running(folder, ScriptedEngine()):
        await asyncio.sleep(0.2)

"""The API process's side of the process boundary: submit, abort, finish, and token streams.

Everything here runs on one event loop. The engine is reached through two ZMQ sockets in a private
folder: a DEALER to `engine.ipc` and a SUB on `pulse.ipc`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from headrace.engine.sockets import INBOX, PULSE
from headrace.engine.token_stream import Account, TokenStream, Watcher
from headrace.errors import EngineDead, HeadraceError, NotReady, by_code
from headrace.messages import (
    EVERY,
    Abort,
    Beat,
    Done,
    End,
    EngineInfo,
    Finish,
    Grammar,
    Look,
    Pooling,
    Pulse,
    Sampling,
    Submit,
    ToEngine,
    TokenOut,
    View,
)

log = logging.getLogger("headrace.client")

BEAT_S = 1.0
TICK_S = 0.25
FIRST_TICK_S = 0.02
FRESH_S = 3.0  # a pulse older than this makes /health and /ready fail
BURST = 64  # engine messages handled before other tasks get the loop

_NONE: Iterable[None] = itertools.repeat(None)  # never ends: no token has a report

State = Literal["loading", "ready", "late", "dead"]


class Job(msgspec.Struct, frozen=True):
    """One prompt of a request; the fields of `Submit` that its caller decides."""

    prompt: list[int]
    max_tokens: int  # 0: only its prompt is computed
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    grammar: Grammar | None = None
    prompt_logprobs: int = -1
    pooling: Pooling | None = None


class EngineClient:
    """One API process's connection to the engine process. `await start()` before use.

    `on_done(stream, done)` is called for each request that ends, aborted ones included.
    """

    def __init__(
        self,
        folder: Path,
        worker: int = 0,
        *,
        engine_timeout_s: float = 10.0,
    ) -> None:
        self._folder = folder
        # A new start of the same worker is a stranger to the engine: old handles cannot reach it.
        self._identity = f"{worker}.{os.getpid()}.{secrets.token_hex(4)}".encode()
        self._engine_timeout_s = engine_timeout_s
        self.on_done: Callable[[TokenStream, Done], None] | None = None
        self.on_view: Callable[[View], None] | None = None  # answers to `look`
        # Told the seconds from a token of a choice to its next one, and how often that was so.
        self.on_gap: Callable[[float, int], None] | None = None
        self._handles = itertools.count(1)
        self._routes: dict[int, tuple[TokenStream, int]] = {}  # handle -> stream, first index
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_out = msgspec.msgpack.Decoder(TokenOut).decode
        self._decode_pulse = msgspec.msgpack.Decoder(Pulse).decode
        self._pulse: Pulse | None = None
        self._pulse_s = time.monotonic()  # when the last pulse came; the start counts as one
        self._dead = False
        self._tick_task: asyncio.Task[None] | None = None
        self._looks_soon = False  # `_readable` is going to be called

    async def start(self) -> None:
        """Connect. The engine may come later; until its first pulse the state is "loading"."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, self._identity)
        self._dealer.setsockopt(zmq.RCVHWM, 0)  # bounded by each stream's backlog instead
        self._dealer.connect(f"ipc://{self._folder / INBOX}")
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(f"ipc://{self._folder / PULSE}")
        self._pulse_s = time.monotonic()
        self._send(Beat())
        self._fd = self._dealer.fileno()
        self._loop.add_reader(self._fd, self._readable)
        self._tick_task = asyncio.create_task(self._tick())

    async def first_pulse(self) -> None:
        """Wait until the engine process was heard, or for `FRESH_S`.

        It pulses from its first moment on, so a process that joins a running server knows the
        engine before it takes a request.
        """
        deadline_s = time.monotonic() + FRESH_S
        while self._pulse is None and time.monotonic() < deadline_s:
            await asyncio.sleep(FIRST_TICK_S)
            self._read_pulses()

    async def close(self) -> None:
        """Abort everything and disconnect."""
        assert self._tick_task is not None, "close() before start()"
        self._tick_task.cancel()
        await asyncio.gather(self._tick_task, return_exceptions=True)
        self._fail_all(EngineDead("the connection to the engine was closed"))
        self._loop.remove_reader(self._fd)
        self._dealer.close(linger=100)  # the last aborts
        self._sub.close()
        self._context.term()

    @property
    def info(self) -> EngineInfo | None:
        """What the loaded engine can do; None while it loads."""
        return self._pulse.info if self._pulse else None

    @property
    def engine_pid(self) -> int:
        """The engine process; 0 before it was heard."""
        return self._pulse.pid if self._pulse else 0

    @property
    def phase(self) -> str:
        """What the engine says it is doing."""
        return self._pulse.phase if self._pulse else "starting"

    @property
    def state(self) -> State:
        """`late`: no pulse for FRESH_S. `dead`: none for engine_timeout_s; streams have failed."""
        age_s = time.monotonic() - self._pulse_s
        if age_s > self._engine_timeout_s or self._dead:
            return "dead"
        if age_s > FRESH_S:
            return "late"
        return "ready" if self.info else "loading"

    @property
    def alive(self) -> bool:
        """The engine's pulse is fresh."""
        return self.state in ("loading", "ready")

    def require(self) -> EngineInfo:
        """The engine's facts. Raises EngineDead or NotReady when nothing can be submitted."""
        if self.info is None and self._tick_task is not None:  # started
            self._read_pulses()  # the one that says ready may have come since the last tick
        if self.state == "dead":
            raise EngineDead("the engine process does not answer")
        if self.info is None:
            raise NotReady(f"the model is still loading ({self.phase})")
        return self.info

    def submit(
        self,
        jobs: list[Job],
        arrived_s: float = 0.0,
        account: Account | None = None,
        watcher: Watcher | None = None,
    ) -> TokenStream:
        """Send one Submit a job; all jobs have the same n. Raises EngineDead or NotReady.

        watcher: the first job is recorded for it, where the engine can.
        """
        records = self.require().records and watcher is not None
        arrived_s = arrived_s or time.monotonic()
        n = jobs[0].n
        assert all(job.n == n for job in jobs), "the jobs of one stream share n"
        stream = TokenStream(self, n, arrived_s)
        stream.account, stream.watcher = account, watcher
        for position, job in enumerate(jobs):
            handle = next(self._handles)
            submit = Submit(
                handle=handle,
                prompt=job.prompt,
                max_tokens=job.max_tokens,
                sampling=job.sampling,
                stop_ids=job.stop_ids,
                n=n,
                priority=job.priority,
                cache_salt=job.cache_salt,
                adapter=job.adapter,
                arrived_s=arrived_s,
                grammar=job.grammar,
                prompt_logprobs=job.prompt_logprobs,
                pooling=job.pooling,
                record=records and not position,
            )
            if not self._send(submit):
                stream.abort()
                raise EngineDead("the engine process takes no requests")
            stream.opened(handle)
            stream.limits[handle] = job.max_tokens
            if account is not None:
                account.submitted(1)
            self._routes[handle] = (stream, position * n)
        return stream

    def send_abort(self, handle: int) -> None:
        """Abort if `handle` is live; its Done still comes and is counted."""
        if handle in self._routes:
            self._send(Abort(handle))

    def send_finish(self, handle: int, choice: int, n_tokens: int) -> None:
        """See `messages.Finish`."""
        if handle in self._routes:
            self._send(Finish(handle, choice, n_tokens))

    def look(self, *, states: bool = False) -> None:
        """Ask for a `View`, which goes to `on_view`. Lost where the engine takes nothing."""
        self._send(Look(states))

    # ------------------------------------------------------------ sockets

    def _send(self, message: ToEngine) -> bool:
        """False when the engine takes nothing more; this loop never waits for it."""
        try:
            self._dealer.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # The FD is edge-triggered and any call may consume the edge: look for input again, once
        # for all that this turn of the loop sends.
        if not self._looks_soon:
            self._looks_soon = True
            self._loop.call_soon(self._readable)
        return True

    def _readable(self) -> None:
        self._looks_soon = False
        if self._dealer.closed:
            return
        for _ in range(BURST):
            try:
                payload = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver(self._decode_out(payload))
        self._loop.call_soon(self._readable)

    def _deliver(self, out: TokenOut) -> None:
        """Hand one engine message to its streams; wake each stream once."""
        now_s = time.monotonic()
        touched: dict[TokenStream, None] = {}
        routes = self._routes
        for handle, told in out.recorded:
            route = routes.get(handle)
            if route is not None and route[0].watcher is not None:
                route[0].watcher.hear(bytes(told))
        if out.view is not None and self.on_view is not None:
            self.on_view(out.view)
        for piece in out.prompt_logprobs:
            route = routes.get(piece.handle)
            if route is not None and not route[0].closed:
                route[0].push_prompt(route[1] // route[0].n, piece.entries)
        for vector in out.vectors:
            route = routes.get(vector.handle)
            if route is not None and not route[0].closed:
                stream = route[0]
                stream.vectors[route[1] // stream.n] = vector.values
                touched[stream] = None
        reports = out.logprobs or _NONE
        befores: dict[float, int] = {}  # when a choice had its token before -> choices
        columns = zip(out.handles, out.choices, out.tokens, reports, strict=False)
        for handle, choice, token, entry in columns:
            route = routes.get(handle)
            if route is not None and not route[0].closed:
                stream, index = route[0], route[1] + choice
                stream.push(index, token)
                if stream.watcher is not None:
                    stream.watcher.token(index, token, now_s)
                if entry is not None:
                    stream.push_logprobs(index, entry)
                said_s = stream.said_s
                if before_s := said_s.get(index):
                    befores[before_s] = befores.get(before_s, 0) + 1
                said_s[index] = now_s
                touched[stream] = None
        whole, others = self._push_ends(out.ends)
        touched.update(dict.fromkeys(whole))
        for stream in touched:
            stream.first_token_s = stream.first_token_s or now_s
            stream.last_token_s = now_s
        if self.on_gap is not None:
            for before_s, times in befores.items():
                self.on_gap(now_s - before_s, times)
        touched.update(dict.fromkeys(others))
        for done in out.dones:
            if done.handle == EVERY:
                self._fail_all(by_code(done.error, done.message))
                continue
            route = routes.pop(done.handle, None)
            if route is not None:
                route[0].push_done(done)
                touched[route[0]] = None
                if self.on_done is not None:
                    self.on_done(route[0], done)
        for stream in touched:
            stream.news()

    def _push_ends(self, ends: list[End]) -> tuple[list[TokenStream], list[TokenStream]]:
        """Streams of which a choice has ended with all that was asked for, and the others. Such an
        end comes with its last token, or where none is drawn instead of one."""
        whole: list[TokenStream] = []
        others: list[TokenStream] = []
        for end in ends:
            route = self._routes.get(end.handle)
            if route is not None and not route[0].closed:
                route[0].push_end(route[1] + end.choice, end)
                (whole if end.reason == "length" else others).append(route[0])
        return whole, others

    def _fail_all(self, error: HeadraceError) -> None:
        """End every stream; no Done will come for any of their handles.

        The aborts are for an engine that is back, or new, and may still run some of them.
        """
        for handle in self._routes:
            self._send(Abort(handle))
        streams = {stream for stream, _ in self._routes.values()}
        self._routes.clear()
        for stream in streams:
            if stream.account is not None:
                stream.account.lost()
            stream.fail(type(error)(error.message))  # an exception instance belongs to one raise

    # ------------------------------------------------------------ liveness

    async def _tick(self) -> None:
        beat_s = 0.0
        while True:
            self._read_pulses()
            now_s = time.monotonic()
            if now_s - beat_s >= BEAT_S:
                self._send(Beat())
                beat_s = now_s
            if not self._dead and now_s - self._pulse_s > self._engine_timeout_s:
                self._dead = True
                log.error("no sign of the engine for %.1f s", now_s - self._pulse_s)
                self._fail_all(EngineDead("the engine process does not answer"))
            await asyncio.sleep(TICK_S)

    def _read_pulses(self) -> None:
        while True:
            try:
                pulse = self._decode_pulse(self._sub.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if self._pulse is not None and pulse.pid != self._pulse.pid:
                log.warning("a new engine process (%d) took over", pulse.pid)
                self._fail_all(EngineDead("the engine process ended and was started again"))
            self._pulse = pulse
            self._pulse_s = time.monotonic()
            self._dead = False

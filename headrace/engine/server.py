"""The engine process: an inbox, a loop that turns the engine, and a pulse.

`serve` never waits for an API process. One that cannot take a message, or is silent for
`api_timeout_s`, loses its requests; when it speaks again it is told so (`messages.EVERY`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import zmq
from prometheus_client import CollectorRegistry

from headrace.config import Settings
from headrace.engine.sockets import INBOX, PULSE
from headrace.messages import (
    EVERY,
    Abort,
    Beat,
    Done,
    EngineInfo,
    Finish,
    Look,
    Pulse,
    Submit,
    ToEngine,
    TokenOut,
)
from headrace.observe.metrics import REGISTRY, EngineMetrics

if TYPE_CHECKING:
    from headrace.engine.protocol import ServingEngine

log = logging.getLogger("headrace.engine")

PULSE_S = 0.5
METRICS_S = 0.02  # while it works, metrics are written so often, whatever a step takes
REST_S = 1.0  # without work, before the engine does what it put off
IDLE_POLL_MS = 500  # an idle engine wakes this often to judge silent API processes
INTAKE = 1024  # messages taken between two steps
SEND_QUEUE = 4096  # messages ZMQ holds for one API process before it counts as stalled

Build = Callable[[Callable[[str], None]], tuple["ServingEngine", EngineInfo]]


class Pulser(threading.Thread):
    """Publishes `Pulse` twice a second, whatever the main thread does, and at each change."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        super().__init__(name="pulse", daemon=True)
        self._socket = context.socket(zmq.PUB)
        self._socket.bind(f"ipc://{folder / PULSE}")
        self._changed = threading.Event()
        self._stopped = False
        self._phase = "starting"
        self._info: EngineInfo | None = None
        self.steps = 0

    def say(self, phase: str) -> None:
        """Set the phase shown to people."""
        self._phase = phase
        self._changed.set()

    def ready(self, info: EngineInfo) -> None:
        """The engine is built."""
        self._phase, self._info = "ready", info
        self._changed.set()

    def stop(self) -> None:
        """Last pulse was sent; ends the thread."""
        self._stopped = True
        self._changed.set()
        self.join()

    def run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while not self._stopped:
            pulse = Pulse(os.getpid(), self._info, self._phase, self.steps)
            with suppress(zmq.Again):
                self._socket.send(encode(pulse), zmq.NOBLOCK)
            self._changed.wait(PULSE_S)
            self._changed.clear()
        self._socket.close(linger=0)


class Peer:
    """One start of one API process, known by its ZMQ identity `worker.pid.random`."""

    __slots__ = ("heard_s", "identity", "lost", "owner")

    def __init__(self, identity: bytes, owner: int, now_s: float) -> None:
        self.identity = identity
        self.owner = owner  # what `Engine` calls it; never used twice
        self.heard_s = now_s
        self.lost = False  # its requests were dropped; told when it speaks again

    @property
    def worker(self) -> bytes:
        """The number of its process, the same after a restart."""
        return self.identity.split(b".", 1)[0]


class Post:
    """The ROUTER socket: takes messages in, sends token messages out, judges who is gone."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        engine: ServingEngine,
        api_timeout_s: float,
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unreachable peer is an error
        self.socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(f"ipc://{folder / INBOX}")
        self._engine = engine
        self._api_timeout_s = api_timeout_s
        self._peers: dict[bytes, Peer] = {}
        self._owners: dict[int, Peer] = {}
        self._next_owner = 0
        self._retired: set[bytes] = set()  # identities replaced; what they left behind is ignored
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode

    def drain(self) -> int:
        """Hand waiting messages to the engine; returns how many (at most INTAKE)."""
        now_s = time.monotonic()
        for taken in range(INTAKE):
            try:
                identity, payload = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return taken
            if identity in self._retired:
                continue
            peer = self._peers.get(identity) or self._meet(identity, now_s)
            peer.heard_s = now_s
            if peer.lost:
                self._confess(peer)
            self._take(peer, payload)
        return INTAKE

    def send(self, outs: Mapping[int, TokenOut]) -> bool:
        """One message an owner; never blocks. Whether all took theirs: who did not is dropped."""
        taken = True
        for owner, out in outs.items():
            peer = self._owners.get(owner)
            if peer is not None and not peer.lost:
                self._send(peer, out)
                taken &= not peer.lost
        return taken

    def judge(self) -> bool:
        """Drop who was silent for too long; whether somebody was. Call only right after an inbox
        was drained empty."""
        now_s, dropped = time.monotonic(), False
        for peer in list(self._peers.values()):
            silent_s = now_s - peer.heard_s
            if silent_s > self._api_timeout_s and not peer.lost:
                self._drop(peer, f"silent for {silent_s:.1f} s")
                dropped = True
        return dropped

    def _take(self, peer: Peer, payload: bytes) -> None:
        try:
            message = self._decode(payload)
        except msgspec.MsgspecError as error:
            log.error("a message from API process %s is not ours: %s", peer.identity, error)
            return
        match message:
            case Submit():
                self._engine.submit(peer.owner, message)
            case Abort():
                self._engine.abort(peer.owner, message)
            case Finish():
                self._engine.finish(peer.owner, message)
            case Look():
                self._engine.look(peer.owner, message)
            case Beat():
                pass

    def _meet(self, identity: bytes, now_s: float) -> Peer:
        """A new API process; an older start of the same worker can only be dead."""
        peer = Peer(identity, self._next_owner, now_s)
        self._next_owner += 1
        for old in [old for old in self._peers.values() if old.worker == peer.worker]:
            if not old.lost:
                self._drop(old, "started again")
            del self._peers[old.identity], self._owners[old.owner]
            self._retired.add(old.identity)
        self._peers[identity] = self._owners[peer.owner] = peer
        return peer

    def _confess(self, peer: Peer) -> None:
        peer.lost = False
        done = Done(EVERY, "request_failed", "this HTTP process was silent for too long")
        self._send(peer, TokenOut([], [], [], [], [done]))

    def _send(self, peer: Peer, out: TokenOut) -> None:
        try:
            self.socket.send_multipart([peer.identity, self._encode(out)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # EAGAIN: its queue is full; EHOSTUNREACH: it is gone
            self._drop(peer, str(error))

    def _drop(self, peer: Peer, why: str) -> None:
        peer.lost = True
        log.warning("API process %s lost its requests: %s", peer.identity.decode(), why)
        self._engine.drop_owner(peer.owner)


class Stopper:
    """Ends `run`: a flag, and a file descriptor that wakes its `poll`."""

    def __init__(self) -> None:
        self.stopped = False
        self.loading = True
        self._listening = False
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        """What `poll` watches."""
        return self._near.fileno()

    def stop(self) -> None:
        """From any thread."""
        self.stopped = True
        with suppress(BlockingIOError):
            self._far.send(b"\0")

    def listen(self) -> None:
        """SIGTERM stops; while loading it exits at once. Main thread only."""
        self._listening = True
        signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us

    def close(self) -> None:
        """After `run`."""
        if self._listening:
            signal.set_wakeup_fd(-1)
        self._near.close()
        self._far.close()

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self.stopped = True
        if self.loading:
            raise SystemExit(0)


def serve(folder: Path, settings: Settings, build: Build) -> None:
    """Run the engine process until SIGTERM. Call in the main thread.

    `build(say)` loads the model; meanwhile the pulse carries what it says. Raises what `build`
    raises, and whatever breaks the engine for good. `settings.served_model_name` labels metrics.
    """
    stopper = Stopper()
    stopper.listen()
    try:
        run(stopper, folder, settings, build)
    finally:
        stopper.close()


def run(
    stopper: Stopper,
    folder: Path,
    settings: Settings,
    build: Build,
    registry: CollectorRegistry = REGISTRY,
) -> None:
    """As `serve`, in any thread, until `stopper.stop()`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pulser = Pulser(context, folder)
    pulser.start()
    try:
        engine, info = build(pulser.say)
        stopper.loading = False
        try:
            post = Post(context, folder, engine, settings.api_timeout_s)
            name = settings.served_model_name or "default"
            metrics = EngineMetrics(name, info.block_size, registry)
            if info.kernels is not None:
                metrics.describe_kernels(msgspec.structs.asdict(info.kernels))
            metrics.update(engine.stats())
            engine.watch(metrics.note)
            pulser.ready(info)
            _loop(stopper, pulser, post, engine, metrics)
        finally:
            engine.close()
    finally:
        pulser.stop()
        context.destroy(linger=0)


def _loop(
    stopper: Stopper,
    pulser: Pulser,
    post: Post,
    engine: ServingEngine,
    metrics: EngineMetrics,
) -> None:
    """Inbox, turn, outbox; blocked in `poll` while there is no work.

    After a second without work the engine does what it put off, one piece after another while the
    inbox is empty: a request waits for one piece at most, and one of a series for none.
    """
    poller = zmq.Poller()
    poller.register(post.socket, zmq.POLLIN)
    poller.register(stopper.fileno(), zmq.POLLIN)
    worked_s = told_s = time.monotonic()
    shown_idle = True  # by the metrics
    while not stopper.stopped:
        if engine.has_work:
            worked_s = time.monotonic()
            _gather(stopper, poller, post, engine)
        elif not poller.poll(0):
            if time.monotonic() - worked_s > REST_S and engine.idle():
                metrics.update(engine.stats())
            else:
                poller.poll(IDLE_POLL_MS)
        taken = post.drain()
        dropped = taken < INTAKE and post.judge()
        if taken or dropped or engine.has_work:
            outs = engine.turn()
            # Before the news go out: who has seen an answer end finds it counted, if the page shows
            # that nothing runs. So a page that does is written anew with the first that runs.
            if not engine.has_work or shown_idle or time.monotonic() - told_s >= METRICS_S:
                shown_idle = _show(engine, pulser, metrics)
                told_s = time.monotonic()
            if not post.send(outs):
                shown_idle = _show(engine, pulser, metrics)


def _show(engine: ServingEngine, pulser: Pulser, metrics: EngineMetrics) -> bool:
    """Write the metrics; whether they show that no request runs or waits."""
    stats = engine.stats()
    pulser.steps = stats.steps
    metrics.update(stats)
    return not (stats.running or stats.waiting)


def _gather(stopper: Stopper, poller: zmq.Poller, post: Post, engine: ServingEngine) -> None:
    """Hear who arrives while the device is busy anyway: they are in the next step, all of them."""
    while (spare_ms := int(engine.spare_s() * 1e3)) > 0 and poller.poll(spare_ms):
        if stopper.stopped:
            return
        post.drain()

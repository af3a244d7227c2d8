"""Publishes KV events over ZMQ, from a thread of its own: the engine never waits for a subscriber.

A PUB socket sends [topic, sequence number (8 bytes, big-endian, from 0), batch]. A ROUTER socket
answers [b"", first sequence number wanted] with [b"", sequence number, batch] for each batch that
is kept, then with the number -1 and no batch.

Beside the newest batches the thread keeps what the cache holds now. Whoever asks for batches that
are gone gets that: AllBlocksCleared and every block, as the newest sequence numbers. So a
subscriber that comes late, or missed too much, knows everything with one answer. Blocks of KV
groups without a window are told of first there: the others follow them.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq

from headrace.config import Settings
from headrace.engine.kv_wire import Wire
from headrace.errors import ConfigError
from headrace.kv.events import EventLog, KVEvent, Removed, Scope, Stored, groups_of

log = logging.getLogger("headrace.engine")

END = (-1).to_bytes(8, "big", signed=True)
QUEUE_TOKENS = 2**21  # of batches that wait, about 80 MB
REPLAY_BYTES = 64 * 2**20  # of batches that are kept
SNAPSHOT_BLOCKS = 512  # in one batch
REPLAY_HWM = 4096  # batches of an answer that ZMQ holds for who asked


class _Block(NamedTuple):
    scope: Scope
    parent: bytes | None
    tokens: bytes  # unsigned 32-bit integers
    groups: int  # bits of those that hold it; not 0


class KVEventPublisher(threading.Thread):
    """`put` is for the engine's thread; everything else happens in this one.

    windows: of the engine's KV groups, in tokens; 0 = none.
    """

    def __init__(self, settings: Settings, block_size: int, windows: Sequence[int] = (0,)) -> None:
        """Binds or connects. Raises ConfigError for an address that cannot be had."""
        super().__init__(name="kv-events", daemon=True)
        self.counts = {"published": 0, "dropped": 0, "replays": 0, "snapshots": 0}
        self._block_size = block_size
        self._wire = Wire(settings.kv_events_encoding, block_size, windows)
        self._groups = range(len(groups_of(windows)))
        self._topic = settings.kv_events_topic.encode()
        self._most = settings.kv_events_max_queue_size
        self._queue: deque[tuple[int, float, list[KVEvent], int]] = deque()
        self._next = 0  # sequence number of the next batch; the engine's thread alone writes it
        self._put_tokens = self._sent_tokens = 0  # each written by one thread
        self._awake = self._stopped = False
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=settings.kv_events_buffer_steps)
        self._kept_bytes = 0
        self._last, self._last_ts = -1, 0.0  # number and time of the newest batch published
        self._held: dict[bytes, _Block] | None = {}  # None: batches were dropped, nobody knows
        self._near, self._far = socket.socketpair()
        self._far.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, settings.kv_events_hwm)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._replay.setsockopt(zmq.SNDHWM, REPLAY_HWM)
        try:
            _join(self._pub, settings.kv_events_endpoint, "kv_events_endpoint")
            if address := settings.kv_events_replay_endpoint:
                _join(self._replay, address, "kv_events_replay_endpoint", bind=True)
        except ConfigError:
            self._close()
            raise

    def put(self, events: list[KVEvent]) -> None:
        """Publish these, soon. Never waits: what finds no room is dropped, its number with it."""
        number, self._next = self._next, self._next + 1
        tokens = sum(len(event.tokens) for event in events if type(event) is Stored)
        waiting = self._put_tokens - self._sent_tokens
        if len(self._queue) >= self._most or (waiting and waiting + tokens > QUEUE_TOKENS):
            self.counts["dropped"] += 1
            return
        self._put_tokens += tokens
        self._queue.append((number, time.time(), events, tokens))
        self._wake()

    def stop(self) -> None:
        """Publish what waits, then end."""
        self._stopped = True
        self._awake = False
        self._wake()
        self.join()

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            with suppress(BlockingIOError):
                self._far.send(b"\0")

    # ------------------------------------------------------------ the thread

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._near.fileno(), zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._near.fileno() in ready:
                self._near.recv(4096)
                self._awake = False  # whoever puts behind this line wakes the thread again
            stopped = self._stopped
            for _ in range(len(self._queue)):
                self._publish(*self._queue.popleft())
            if self._replay in ready:
                self._answer()
            if stopped:
                break
        self._close()

    def _close(self) -> None:
        self._pub.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()
        self._near.close()
        self._far.close()

    def _publish(self, number: int, ts: float, events: list[KVEvent], tokens: int) -> None:
        payload = self._wire.encode(ts, events)
        with suppress(zmq.Again):
            frames = [self._topic, number.to_bytes(8, "big"), payload]
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        self.counts["published"] += 1
        self._keep(number, payload)
        if number != self._last + 1:
            self._held = None
        self._last, self._last_ts = number, ts
        if self._held is not None:
            self._mirror(self._held, events)
        self._sent_tokens += tokens

    def _keep(self, number: int, payload: bytes) -> None:
        kept = self._kept
        if len(kept) == kept.maxlen:
            self._kept_bytes -= len(kept[0][1])
        kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > REPLAY_BYTES and len(kept) > 1:
            self._kept_bytes -= len(kept.popleft()[1])

    def _mirror(self, held: dict[bytes, _Block], events: Sequence[KVEvent]) -> None:
        size, none = self._block_size, _Block(Scope(), None, b"", 0)
        for event in events:
            if isinstance(event, Removed):
                for digest in event.digests:
                    block = held.get(digest, none)
                    if left := block.groups & ~(1 << event.group):
                        held[digest] = block._replace(groups=left)
                    else:
                        held.pop(digest, None)
            elif isinstance(event, Stored):
                parent, packed = event.parent, array("I", event.tokens).tobytes()
                for i, digest in enumerate(event.digests):
                    tokens = packed[4 * size * i : 4 * size * (i + 1)]
                    groups = held.get(digest, none).groups | 1 << event.group
                    held[digest] = _Block(event.scope, parent, tokens, groups)
                    parent = digest

    # ------------------------------------------------------------ replay

    def _answer(self) -> None:
        """One request for old batches."""
        who, *rest = self._replay.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            log.warning("a request for KV events is not [b'', 8 bytes]")
            return
        first = int.from_bytes(rest[1], "big")
        self.counts["replays"] += 1
        if first <= self._last and (not self._kept or first < self._kept[0][0]):
            batches = self._snapshot(first)
        else:
            batches = iter([batch for batch in self._kept if batch[0] >= first])
        try:
            for number, payload in batches:
                self._reply(who, number.to_bytes(8, "big"), payload)
            self._reply(who, END, b"")
        except zmq.ZMQError as error:  # EAGAIN: it does not read; EHOSTUNREACH: it is gone
            log.info("a replay of KV events was cut short: %s", error)

    def _reply(self, who: bytes, number: bytes, payload: bytes) -> None:
        self._replay.send_multipart([who, b"", number, payload], zmq.NOBLOCK)

    def _snapshot(self, first: int) -> Iterator[tuple[int, bytes]]:
        """What is held, in batches numbered up to the newest one, none below `first`, with its
        time, by which a subscriber knows it again. Where nobody knows what is held: the batches
        that are kept."""
        if self._held is None:
            yield from list(self._kept)
            return
        self.counts["snapshots"] += 1
        held, digests = self._held, list(_parents_first(self._held))
        parts = [
            (group, d) for group in self._groups for d in digests if held[d].groups >> group & 1
        ]
        blocks = max(SNAPSHOT_BLOCKS, -(-len(parts) // (self._last + 1 - first)))
        count = max(1, -(-len(parts) // blocks))
        for piece in range(count):
            told = EventLog()
            if not piece:
                told.cleared()
            for group, digest in parts[piece * blocks : (piece + 1) * blocks]:
                block = held[digest]
                told.stored(block.scope, block.parent, digest, array("I", block.tokens), group)
            payload = self._wire.encode(self._last_ts, told.take())
            yield self._last + 1 - count + piece, payload


def _parents_first(held: dict[bytes, _Block]) -> Iterator[bytes]:
    done: set[bytes] = set()
    for digest in held:
        path: list[bytes] = []
        at: bytes | None = digest
        while at is not None and at in held and at not in done:
            path.append(at)
            done.add(at)
            at = held[at].parent
        yield from reversed(path)


def binds(address: str) -> bool:
    """vLLM's rule: an address that names no host is listened at, to another one connects."""
    return "*" in address or "::" in address or not address.startswith("tcp://")


def _join(to: zmq.Socket[bytes], address: str, key: str, *, bind: bool = False) -> None:
    try:
        if bind or binds(address):
            to.bind(address)
        else:
            to.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"{key} = {address!r}: {error.strerror}", param=key) from None

"""The sockets of KV events: one subscription and one line for questions a worker.

All of it runs in the gateway's loop, a few batches a turn, so that no stream waits for events: a
thread would hold the interpreter for longer than that. ZMQ's own thread takes in what comes
meanwhile, up to a limit, and drops the rest; the numbers of the batches tell.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
import zmq

from headrace.gateway.event_feed import Feed

log = logging.getLogger("headrace.gateway")

TURN_S = 0.0005  # of the loop at a time; one batch at least
HWM = 1000  # batches that ZMQ holds for us, each way
_END = (2**64 - 1).to_bytes(8, "big")


class EventSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker publishes; endpoints as one connects to them."""

    endpoint: str
    replay_endpoint: str = ""  # "" = it cannot be asked
    topic: str = ""
    windows: tuple[int, ...] = ()  # of its KV groups, in tokens, 0 = none; () = it does not say


class Subscription:
    """One worker's sockets, feeding `feed`. Needs a running loop."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], source: EventSource, feed: Feed
    ) -> None:
        """Raises zmq.ZMQError for an address that is none."""
        self.source, self.feed = source, feed
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._open: list[zmq.Socket[bytes]] = []
        self._turning = self._complained = False
        self._ask: zmq.Socket[bytes] | None = None
        self._cuts: zmq.Socket[bytes] | None = None  # ZMQ says here that the line was cut
        try:
            self._sub = self._socket(zmq.SUB)
            self._sub.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
            self._cuts = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._loop.add_reader(self._cuts.fileno(), self._soon)
            self._sub.connect(source.endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self._send()
        self._soon()

    def tick(self) -> None:
        """About once a second."""
        self.feed.tick(time.monotonic())
        self._send()
        self._soon()

    def doubt(self) -> None:
        """The worker was away."""
        self.feed.doubt()
        self._send()

    def close(self) -> None:
        """Hear nothing more."""
        if self._cuts is not None:
            self._loop.remove_reader(self._cuts.fileno())
            self._sub.disable_monitor()
            self._cuts.close(linger=0)
            self._cuts = None
        for made in self._open:
            self._loop.remove_reader(made.fileno())
            made.close(linger=0)
        self._open.clear()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        self._open.append(made)
        self._loop.add_reader(made.fileno(), self._soon)
        made.setsockopt(zmq.RCVHWM, HWM)
        made.setsockopt(zmq.LINGER, 0)
        return made

    def _soon(self) -> None:
        if not self._turning and self._open:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """A few batches. Descriptors of ZMQ tell of a change once: read until there is none."""
        self._turning = False
        if not self._open:
            return
        feed = self.feed
        began_s = now_s = time.monotonic()
        while now_s - began_s < TURN_S:
            more = feed.work(now_s) or self._answer(now_s) or self._news(now_s) or self._cut()
            self._send()
            if not more:
                return
            now_s = time.monotonic()
        self._soon()

    def _news(self, now_s: float) -> bool:
        try:
            frames = self._sub.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) == 3 and len(frames[1]) == 8:
            self.feed.live(int.from_bytes(frames[1], "big"), frames[2], now_s)
        return True

    def _cut(self) -> bool:
        """The line was cut: what comes now may be of another run. What came before was read."""
        assert self._cuts is not None, "open"
        try:
            self._cuts.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.feed.doubt()
        return True

    def _answer(self, now_s: float) -> bool:
        if self._ask is None:
            return False
        try:
            frames = self._ask.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) < 2 or len(frames[-2]) != 8:
            return True
        if frames[-2] == _END:
            self.feed.reply_end(now_s)
        else:
            self.feed.reply(int.from_bytes(frames[-2], "big"), frames[-1], now_s)
        return True

    def _send(self) -> None:
        """Ask for what the feed wants, on a new line: answers to an older question never mix in."""
        if self.feed.wants is None or not self.source.replay_endpoint:
            return
        if self._ask is not None:
            self._open.remove(self._ask)
            self._loop.remove_reader(self._ask.fileno())
            self._ask.close(linger=0)
        first = self.feed.wants
        self.feed.asked(time.monotonic())
        self._ask = self._socket(zmq.DEALER)
        try:
            self._ask.connect(self.source.replay_endpoint)
            self._ask.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the feed will miss its answer, and ask again
            if not self._complained:
                log.error("no replay of KV events from %s: %s", self.source.replay_endpoint, error)
            self._complained = True
        self._soon()

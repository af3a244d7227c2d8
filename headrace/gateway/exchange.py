"""One request: placed, sent, relayed, and ended exactly once, whatever happens."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from typing import TYPE_CHECKING

import msgspec

from headrace.error_bodies import ANTHROPIC
from headrace.errors import HeadraceError, QueueFull, RateLimited, TimedOut, WorkerLost
from headrace.foreign_json import Malformed, read_json
from headrace.gateway.answers import event_of, status_of
from headrace.gateway.connection import Client, Request
from headrace.gateway.fleet import NoRoom, Placement
from headrace.gateway.headers import LIMITS, request_head, request_id, sent_back
from headrace.gateway.kept import STREAM_ID
from headrace.gateway.limits import Reservation
from headrace.gateway.prompt import Prompt
from headrace.gateway.queue import Waiting
from headrace.gateway.spans import RequestSpans
from headrace.gateway.sse import EventStream, Usage
from headrace.gateway.tenants import Tenant
from headrace.gateway.tokenising import body_for
from headrace.gateway.upstream import Headers, Upstream
from headrace.gateway.worker import Worker

if TYPE_CHECKING:
    from headrace.gateway.app import Gateway

RETRIED = frozenset({502, 503, 504, 508})  # another worker may do better
MAX_HELD_BYTES = 2**20  # of an answer that is no stream; a longer one passes as it comes


class _UsageOnly(msgspec.Struct):
    usage: object = None


class Exchange:
    """The client's `Serving` and the worker's `Answer`."""

    def __init__(self, gateway: Gateway, client: Client, request: Request, tenant: Tenant) -> None:
        self._gateway, self._client, self._request = gateway, client, request
        self._tenant = tenant
        self.id = request_id(request)  # clients may give several the same
        self.number = next(gateway.numbers)
        self.since_s = time.monotonic()
        self._tried: set[str] = set()
        if gateway.tracer is not None:
            self._spans = RequestSpans(gateway.tracer, request, self.id, self.since_s)

    # What most requests never change is found on the class.
    worker: Worker | None = None
    _spans: RequestSpans | None = None
    _reservation: Reservation | None = None
    _waiting: Waiting | None = None
    _usage: Usage | None = None
    _placement: Placement | None = None
    _upstream: Upstream | None = None
    _connecting: asyncio.Task[None] | None = None
    _deaths = 0  # workers that died over this request
    _over = _begun = False  # begun: the client got a byte
    _fetches = False  # the answer is what the worker kept: nothing is computed for it
    _slow = False
    # Of an attempt; `_reset` forgets them.
    _status = 0
    _headers: Headers = []  # noqa: RUF012 - replaced, never changed
    _events: EventStream | None = None
    _held = b""
    _stale_once = True

    def _reset(self) -> None:
        """Forget the answer of an attempt."""
        self._status, self._headers, self._held = 0, [], b""
        self._events, self._stale_once = None, True

    # ------------------------------------------------------------ to the worker

    def start(self) -> None:
        """Read, place, send."""
        request = self._request
        try:
            self._prompt: Prompt = self._gateway.reader.read(
                request.path, request.body, request.known
            )
        except HeadraceError as error:
            self._refuse(error)
            return
        tokens = None
        if self._prompt.computes:
            tokens = self._gateway.tokenising.start(request.path, self._prompt)
        if tokens is None:
            self._reserve()
        else:
            tokens.add_done_callback(self._tokenised)

    def _tokenised(self, tokens: asyncio.Future[array[int] | str]) -> None:
        if not self._over and not tokens.cancelled():
            self._gateway.tokenising.take(self._prompt, tokens)
            self._reserve()

    def _reserve(self) -> None:
        """What it may use is taken from its tenant's limits, all of it before anything runs."""
        tokens = self._prompt.prompt_tokens + self._prompt.output_tokens
        account, ledger = self._tenant.account, self._gateway.ledger
        if ledger is not None and account.limited:
            ledger.reserve(self._tenant.name, account, tokens, self._admitted)
        else:
            self._admitted(account.reserve(tokens, self.since_s))

    def _admitted(self, got: Reservation | RateLimited) -> None:
        """The limits have spoken."""
        if isinstance(got, RateLimited):
            if not self._over:
                self._gateway.metrics.limited.add(self._tenant.name)
                self._refuse(got)
            return
        if self._over:  # the client left meanwhile
            got.settle(0, time.monotonic())
            return
        self._reservation = got
        try:
            if self._prompt.waits and self._gateway.queue.waits_for(self._prompt.line):
                self._wait()
                self._gateway.pump_soon()
            else:
                self._place_or_wait()
        except HeadraceError as error:
            self._refuse(error)

    def _place_or_wait(self) -> None:
        try:
            self._place()
        except NoRoom:
            self._wait()

    def _wait(self) -> None:
        """Wait until a worker has room, or has started. Raises QueueFull where that is in vain."""
        queue, tier = self._gateway.queue, self._tenant.tier
        start_s = self._gateway.fleet.start_s(self._prompt.model)
        if not tier.queue_s or queue.full:
            raise QueueFull("every worker is busy, and no more may wait")
        expected_s = queue.predicted_wait_s()
        if expected_s > tier.queue_s and not start_s:
            late = QueueFull(f"a worker is expected to be free after {expected_s:.3g} s")
            late.retry_after_s = math.ceil(expected_s - tier.queue_s)
            raise late
        self.worker = None
        now_s = time.monotonic()
        self._waiting = Waiting(
            self._tenant.name,
            self._prompt.line,
            tier.priority,
            now_s,
            now_s + max(tier.queue_s, start_s),
            self._go,
            self._late,
        )
        queue.add(self._waiting)

    def _go(self) -> bool:
        """A worker may have room. Whether it waits no more."""
        assert self._waiting is not None, "it waits"
        waited_s = time.monotonic() - self._waiting.since_s
        try:
            self._place()
        except NoRoom:
            return False
        except HeadraceError as error:
            self._refuse(error)
        if self._spans is not None:
            self._spans.waited(self._waiting.since_s)
        self._waiting = None
        self._gateway.metrics.queue_s.observe(waited_s)
        return True

    def _late(self) -> None:
        self._waiting = None
        waited_s = asyncio.get_running_loop().time() - self.since_s
        self._refuse(QueueFull(f"no worker was free within {waited_s:.3g} s"))

    def _place(self) -> None:
        placement = self._gateway.fleet.place(self._prompt, self._tried)
        self._placement, self.worker = placement, placement.worker
        self._tried.add(placement.worker.name)
        after_s = time.monotonic() - self.since_s
        connection = placement.worker.pool.take()
        if connection is None:
            self._connect(placement.worker)
        else:
            self._send(connection)
        self._gateway.queue.serve(self._tenant.name, placement.lease.uncached_tokens, 0)
        self._gateway.decided(self, after_s, self._tenant.name, self._prompt, placement)

    def _connect(self, worker: Worker) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connected(worker))

    async def _connected(self, worker: Worker) -> None:
        try:
            connection = await worker.pool.connect()
        except OSError as error:  # TimeoutError is one
            self._connecting = None
            if not self._over:
                said = str(error) or type(error).__name__
                self._fail("connect", f"no connection to a worker: {said}")
            return
        self._connecting = None
        if self._over:
            worker.pool.give_back(connection)
        else:
            self._send(connection)

    def _send(self, connection: Upstream) -> None:
        assert self.worker is not None, "placed"
        self._upstream = connection
        spec, request = self.worker.spec, self._request
        body = body_for(self._prompt, self.worker)
        if self._spans is not None:
            request = self._spans.attempt(request, self.worker.name, self._prompt.model)
        head = request_head(
            request,
            self.worker.host,
            self.id.encode(),
            len(body),
            spec.api_key.encode(),
            self._gateway.mark,
            self.worker.tag.encode(),
            keyed=self._gateway.doorkeeper.keyed,
        )
        connection.ask(head + body, self)
        if self._slow:
            connection.pause(True)

    # ------------------------------------------------------------ from the worker

    def began(self, status: int, headers: Headers) -> None:
        """The head of an answer."""
        self._status, self._headers = status, headers
        if status != 200:
            return
        if not self._prompt.computes and (kept := self._prompt.kept) is not None:
            # To a worker that resumes no streams Last-Event-ID says nothing: it begins a new one.
            again = (STREAM_ID, kept.name.encode()) in headers
            self._fetches = not self._prompt.waits or again
        for name, value in headers:
            if name == b"content-type" and value.startswith(b"text/event-stream"):
                self._events = EventStream(self._prompt.strip_usage)

    def said(self, data: bytes) -> None:
        """A piece of it."""
        if self._over:
            return
        if self._events is not None:
            self._relay(self._events, self._events.feed(data))
        elif self._begun:
            self._client.send(data)
        else:
            self._held += data
            if len(self._held) > MAX_HELD_BYTES:
                held, self._held = self._held, b""
                self._begin(self._status, self._headers, held)

    def _relay(self, events: EventStream, data: bytes) -> None:
        if self._begun:
            self._client.send(data)
            return
        if not data:
            return
        if events.begins_with_error and events.error is not None:
            self._first_is_error(events.error)
            return
        if events.events and self._placement is not None:
            self._placement.lease.begin(time.monotonic())
        self._begin(200, self._headers, data)

    def _first_is_error(self, error: dict[str, object]) -> None:
        """A stream that begins with an error gets the error's own status."""
        status = status_of(error)
        self._count_stream_error()
        self._drop_upstream()
        if self._may_retry(status):
            self._retry(count=False)
            return
        kind = {"type": "error"} if self._request.path.startswith(ANTHROPIC) else {}
        body = msgspec.json.encode({**kind, "error": error})
        self._answer(status, [(b"content-type", b"application/json")], body)

    def ended(self) -> None:
        """The whole answer is here."""
        self._upstream = None
        if self._over:
            return
        assert self.worker is not None, "placed"
        if self._status >= 500 and not self._is_busy():
            self.worker.breaker.failed(time.monotonic())
            self._gateway.metrics.failures.add(self.worker.name, str(self._status))
        elif self._events is None or self._events.error is None:
            self.worker.breaker.succeeded()
        if self._events is not None:
            self._stream_ended(self._events)
        elif self._begun:
            self._finish(self._status)
            self._client.finish()
        elif self._may_retry(self._status):
            self._retry(count=False)
        else:
            self._settle(self._held)
            self._answer(self._status, self._headers, self._held)

    def _stream_ended(self, events: EventStream) -> None:
        assert self.worker is not None, "placed"
        rest = events.flush()
        if not self._begun and not rest:
            if not self._fetches:
                self.broken("the worker's stream has no event", False)
                return
            self._begin(200, self._headers, b"")  # who came back has seen it all
        elif not self._begun:
            self._relay(events, rest)
            rest = b""
            if self._over or not self._begun:
                return  # it began with an error
        if events.error is not None:
            self._count_stream_error()
        elif not events.ended and (events.events or not self._fetches):
            self._gateway.metrics.endless.add(self.worker.name)
        self._finish(self._status)
        self._client.finish(rest)

    def broken(self, reason: str, stale: bool) -> None:
        """No more comes, and it was not all."""
        self._upstream = None
        if self._over:
            return
        assert self.worker is not None, "placed"
        if stale and self._stale_once:
            self._stale_once = False
            self._connect(self.worker)
            return
        self._deaths += 1
        self._fail("broken", reason)

    def hangs(self) -> None:
        """The worker says nothing any more, to nobody."""
        self._drop_upstream()
        if not self._over:
            self._fail("hung", "the worker does not answer any more")

    def _fail(self, kind: str, reason: str) -> None:
        """This attempt is lost: another, or an error."""
        assert self.worker is not None, "placed"
        self.worker.breaker.failed(time.monotonic())
        self._gateway.metrics.failures.add(self.worker.name, kind)
        if not self._begun and self._may_retry(502) and self._deaths < 2:
            self._retry(count=True)  # a request that kills workers gets no third one
            return
        kept = self._prompt.kept
        error = kept.away() if kept is not None and kind == "connect" else WorkerLost(reason)
        if not self._begun:
            self._refuse(error)
        elif self._events is None:
            self._finish(502)
            self._client.abort()  # its length was announced: only the end of the line is honest
        else:
            self._gateway.metrics.endless.add(self.worker.name)
            apart = b"\n\n" if self._events.inside else b""
            self._finish(502)
            self._client.finish(apart + event_of(error, self._request.path))

    def _may_retry(self, status: int) -> bool:
        most = self._gateway.settings.retries
        alone = self._prompt.kept is not None  # no other worker has what is asked for
        return status in RETRIED and not (self._begun or alone) and len(self._tried) <= most

    def _retry(self, *, count: bool) -> None:
        """Place it again, elsewhere. What the last worker said is told if there is nowhere."""
        status, headers, held = self._status, self._headers, self._held
        if self._placement is not None:
            self._placement.lease.end()
            self._gateway.pump_soon()
        try:
            self._reset()
            self._place_or_wait()
            self._gateway.metrics.retries.add()
        except HeadraceError as error:
            if count or not held:
                self._refuse(
                    WorkerLost("the worker failed, and no other can take it") if count else error
                )
            else:
                self._answer(status, headers, held)

    def _is_busy(self) -> bool:
        """A 503 with Retry-After says that the worker lives and has no room."""
        return self._status == 503 and any(name == b"retry-after" for name, _ in self._headers)

    # ------------------------------------------------------------ to the client

    def _begin(self, status: int, headers: Headers, data: bytes) -> None:
        self._begun = True
        self._gateway.metrics.ttfb_s.observe(time.monotonic() - self.since_s)
        own = self._own_headers()
        sent = sent_back(headers, limited=LIMITS in own)
        if self._events is not None:
            own += b"x-accel-buffering: no\r\n"
        self._client.begin(status, sent, data, own)

    def _own_headers(self) -> bytes:
        """The request's id and what is left of its tenant's limits, as they are written."""
        limits = self._tenant.account.headers(time.monotonic())
        return b"x-request-id: %b\r\n%b" % (self.id.encode(), limits)

    def _answer(self, status: int, headers: Headers, body: bytes) -> None:
        self._begun = True
        self._gateway.metrics.ttfb_s.observe(time.monotonic() - self.since_s)
        own = self._own_headers()
        self._finish(status)
        self._client.answer(status, sent_back(headers, limited=LIMITS in own), body, own)

    def _refuse(self, error: HeadraceError) -> None:
        self._finish(error.status)
        self._client.refuse(error, self._request.path, self._own_headers(), self.id)

    def client_gone(self) -> None:
        """Nobody listens: the worker stops at once."""
        if not self._over:
            self._drop_upstream()
            self._finish(499)

    def client_slow(self, slow: bool) -> None:
        """The worker waits for the client, or goes on."""
        self._slow = slow
        if self._upstream is not None:
            self._upstream.pause(slow)

    def check(self, now_s: float) -> None:
        """End it if it takes too long. Called about once a second."""
        limit_s = self._gateway.settings.request_timeout_s
        if self._over or not limit_s or now_s - self.since_s <= limit_s:
            return
        self.end_with(TimedOut(f"the answer took longer than {limit_s:g} s"))

    def end_with(self, error: HeadraceError) -> None:
        """Not the worker's fault, but it ends here."""
        self._drop_upstream()
        if self._over:
            return
        if not self._begun:
            self._refuse(error)
        elif self._events is None:
            self._finish(error.status)
            self._client.abort()
        else:
            self._finish(error.status)
            self._client.finish(event_of(error, self._request.path))

    def _drop_upstream(self) -> None:
        if self._waiting is not None:
            self._gateway.queue.remove(self._waiting)
            self._waiting = None
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    # ------------------------------------------------------------ the end

    def _count_stream_error(self) -> None:
        assert self.worker is not None, "placed"
        self._gateway.metrics.stream_errors.add(self.worker.name)

    def _settle(self, body: bytes) -> None:
        """Read the usage of an answer that is no stream."""
        if self._status != 200 or self._fetches or b'"usage"' not in body:
            return
        usage = Usage()
        try:
            usage.read(read_json(body, _UsageOnly).usage)
        except Malformed:
            return
        self._used(usage)

    def _used(self, usage: Usage) -> None:
        assert self._placement is not None, "placed"
        self._usage = usage
        self._gateway.used(self, self._tenant.name, self._prompt, self._placement, usage)

    def _finish(self, status: int) -> None:
        """Once, at the end of every path, before the client sees that end: who asks then finds the
        request counted, and its place free."""
        if self._over:
            return
        self._over = True
        if self._placement is not None:
            self._placement.lease.end()
        if self._events is not None and not self._fetches:
            self._used(self._events.usage)
        if self._reservation is not None:
            tokens, output_tokens = self._used_tokens(status)
            self._gateway.queue.serve(self._tenant.name, 0, output_tokens)
            self._reservation.settle(tokens, time.monotonic())
        if self._spans is not None:
            self._spans.ended(status, self._usage)
        self._gateway.ended(self, status)

    def _used_tokens(self, status: int) -> tuple[int, int]:
        """All tokens and output tokens that it used, as well as anybody can tell."""
        assert self._reservation is not None, "reserved"
        usage, events = self._usage, self._events
        if self._fetches:  # its prompt was paid for when it began
            return (events.events, events.events) if events is not None else (0, 0)
        if usage is not None and usage.prompt_tokens >= 0:
            output_tokens = usage.output_tokens if usage.output_tokens > 0 else 0
            return usage.prompt_tokens + output_tokens, output_tokens
        if events is not None and events.events:  # about a token an event
            return self._prompt.prompt_tokens + events.events, events.events
        if status == 499 and self._placement is not None:
            return self._prompt.prompt_tokens, 0
        if status == 200:
            return self._reservation.tokens, self._prompt.output_tokens
        return 0, 0

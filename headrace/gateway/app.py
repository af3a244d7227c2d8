"""The gateway: its parts joined, its routes, its start and its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from headrace import __version__
from headrace.error_bodies import body_of
from headrace.errors import (
    HeadraceError,
    Loop,
    NotFound,
    ShuttingDown,
    WrongMethod,
)
from headrace.foreign_json import Malformed, read_json, refusal
from headrace.gateway import page
from headrace.gateway.board import Board
from headrace.gateway.checks import Checks
from headrace.gateway.connection import JSON, Client, Request, Serving
from headrace.gateway.console import JOINED, Console, joined
from headrace.gateway.decisions import MIN_MISS_TOKENS, Decisions, one_of
from headrace.gateway.exchange import Exchange
from headrace.gateway.fleet import Fleet, Placement
from headrace.gateway.headers import came_back, mark_of
from headrace.gateway.kept import METHODS, is_kept
from headrace.gateway.ledger import Ledger
from headrace.gateway.lint import Lint
from headrace.gateway.metrics import GatewayMetrics, merged
from headrace.gateway.prompt import GENERATES, Prompt, PromptReader
from headrace.gateway.queue import Queue
from headrace.gateway.registry import Registry
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.siblings import Answering, Gathering, Kept, Siblings
from headrace.gateway.sse import Usage
from headrace.gateway.tenants import Doorkeeper
from headrace.gateway.tokenising import ModelTokens, Tokenising
from headrace.gateway.worker import Worker
from headrace.observe.exposition import CONTENT_TYPE
from headrace.observe.tracing import Tracer

log = logging.getLogger("headrace.gateway")

RELAYED = GENERATES | {
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/classify",
    "/tokenize",
    "/detokenize",
}
OPEN = frozenset({"/health", "/ready"})  # need no key
DECISIONS = "/gateway/decisions/"
TOGETHER = frozenset(
    {"/metrics", "/gateway/drain", *JOINED}
)  # all processes behind a port are asked
BACKLOG = 4096  # connections that the kernel holds until they are accepted
TICK_S = 1.0


class Gateway:
    """One process. `run` serves until it is told to stop."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: Registry,
        doorkeeper: Doorkeeper,
        siblings: Siblings | None = None,
        board: Board | None = None,
        models: Mapping[str, ModelTokens] | None = None,
    ) -> None:
        """siblings and board: there are other processes behind the same port. models: those whose
        prompts are tokenised here."""
        self.settings = settings
        self.registry = registry
        self.fleet = Fleet(settings, board)
        self.fleet.registry = registry
        self._siblings = siblings
        self.mark = mark_of(str(siblings.path.parent) if siblings is not None else "")
        self.fleet.changed.append(self._worker_hangs)
        self.reader = PromptReader(settings.ask_usage)
        self.doorkeeper = doorkeeper
        self.ledger: Ledger | None = None
        if settings.redis_url:
            self.ledger = Ledger(
                settings.redis_url, settings.redis_timeout_s, gateways=settings.processes
            )
        self.queue = Queue(settings.max_queue, settings.starve_s)
        self.metrics = GatewayMetrics(self.fleet, self.queue)
        self.tracer: Tracer | None = None
        if endpoint := settings.otlp_endpoint:
            ratio, numbers = settings.trace_ratio, self.metrics.registry
            self.tracer = Tracer("headrace-gateway", endpoint, ratio, numbers)
        self.tokenising = Tokenising(models or {}, settings.tokenizer_threads, self._tokenised)
        self.numbers = itertools.count()  # of exchanges
        self.decisions = Decisions(settings.decisions, settings.policy, self.fleet.knobs)
        self.lint: Lint | None = None
        if settings.lint:
            excerpts, linted = settings.lint_excerpts, self.metrics.linted
            self.lint = Lint(settings.lint_bytes, excerpts=excerpts, found=linted)
        self.console = Console(
            settings,
            self.fleet,
            self.queue,
            doorkeeper,
            self.decisions,
            self.lint,
            self.metrics,
        )
        self._pumping = False
        self.draining = False
        self.exchanges: set[Exchange] = set()
        self.clients: set[Client] = set()
        self.port = 0
        self._checks = Checks(self.fleet, settings, self.mark)
        self._stop = asyncio.Event()
        self._idle = asyncio.Event()
        self._routes: dict[str, Callable[[], tuple[int, Any]]] = {
            "/health": lambda: (200, {"status": "ok"}),
            "/ready": self._ready,
            "/version": lambda: (200, {"version": __version__}),
            "/v1/models": self._models,
        }

    @property
    def url(self) -> str:
        """Where it listens."""
        host = self.settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def page(self) -> str:
        """Where its page is; "" = nowhere."""
        settings, keyed = self.settings, self.doorkeeper.keyed
        return page.address(self.url, settings.host, shown=settings.ui, keyed=keyed)

    # ------------------------------------------------------------ life

    async def run(self, sock: socket.socket, ready: Callable[[Gateway], None]) -> None:
        """Serve on `sock` until `stop`, then drain. `ready` is called when it listens."""
        loop = asyncio.get_running_loop()
        self.registry.start(self._apply)
        if self.ledger is not None:
            await self.ledger.start()
        server = await loop.create_server(self._client, sock=sock, backlog=BACKLOG)
        inside: asyncio.Server | None = None
        if self._siblings is not None:
            self._siblings.path.unlink(missing_ok=True)  # of one that died in this place
            inside = await loop.create_unix_server(self._inside, str(self._siblings.path))
        self.port = int(sock.getsockname()[1])
        ticking = asyncio.create_task(self._tick())
        try:
            ready(self)
            await self._stop.wait()
            self.draining = True
            server.close()
            await self._drain()
        finally:
            if inside is not None:
                inside.close()
            ticking.cancel()
            self.registry.close()
            await asyncio.gather(ticking, return_exceptions=True)
            await self._checks.stop()
            for exchange in list(self.exchanges):
                exchange.end_with(ShuttingDown("the gateway stops"))
            for client in list(self.clients):
                client.close_idle()
            if self.ledger is not None:
                await self.ledger.stop()
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)
            self.fleet.apply(())
            self.fleet.beliefs.close()
            self.tokenising.close()
            await self.fleet.stopped()
            await asyncio.sleep(0)  # transports close in the next turn

    def stop(self) -> None:
        """Take nothing new, let what runs end; a second call ends it at once."""
        if self._stop.is_set():
            self._idle.set()
        self._stop.set()

    async def _drain(self) -> None:
        for client in list(self.clients):
            client.close_idle()
        if not self.exchanges:
            return
        log.info("%d requests are still answered", len(self.exchanges))
        try:
            async with asyncio.timeout(self.settings.shutdown_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests are cut", len(self.exchanges))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self.registry.tick()
            settings = self.settings
            for client in list(self.clients):
                client.check(now_s, settings.receive_timeout_s, settings.stall_timeout_s)
            for exchange in list(self.exchanges):
                exchange.check(now_s)
            for worker in self.fleet.workers.values():
                for lease in list(worker.leases):
                    lease.assume(now_s)
                waited_for = any(self.queue.waits_for(model) for model in worker.models)
                self.fleet.keep(worker, now_s, waited_for)
            self.fleet.beliefs.tick()
            self.queue.expire(now_s)
            self.pump_soon()

    def pump_soon(self) -> None:
        """A worker may have room: in the next turn, so that no call finds itself inside another."""
        if len(self.queue) and not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        self.queue.pump(time.monotonic())

    def _apply(self, specs: Any) -> None:
        self.fleet.apply(specs)
        self._checks.sync()

    def _client(self) -> Client:
        return Client(self._handle, self.clients, self.settings.max_body_bytes)

    def _inside(self) -> Client:
        return Client(self._handle_sibling, self.clients, self.settings.max_body_bytes)

    def _worker_hangs(self, worker: Worker) -> None:
        for exchange in list(self.exchanges):
            if exchange.worker is worker:
                exchange.hangs()

    # ------------------------------------------------------------ routes

    def _handle(self, client: Client, request: Request) -> Serving | None:
        path = request.path
        try:
            if came_back(request, self.mark):
                raise Loop("a worker of this gateway leads back to it")
            if page.is_page(path):
                self._page(client, request)
                return None
            if path not in OPEN:
                if path == "/metrics" or path.startswith("/gateway/"):
                    self.doorkeeper.admit_admin(request.known)
                    if path in page.DATA or b"origin" in request.known:
                        page.check(self.settings.host, self.doorkeeper.keyed, request)
                tenant = self.doorkeeper.admit(request.known)
            if path in RELAYED or is_kept(path):
                if path in RELAYED:
                    self._only(request, b"POST")
                elif request.bare or request.method not in METHODS:
                    raise WrongMethod(f"{path} takes GET and DELETE")
                if self.draining:
                    raise ShuttingDown("the gateway is stopping")
                exchange = Exchange(self, client, request, tenant)
                self.exchanges.add(exchange)
                self._idle.clear()
                exchange.start()
                return exchange
            if self._siblings is not None and (path in TOGETHER or path.startswith(DECISIONS)):
                return Gathering(client, self._together(client, request, self._siblings))
            self._own(client, request)
        except HeadraceError as error:
            self.metrics.requests.add(str(error.status))
            client.refuse(error, path)
        return None

    def _handle_sibling(self, client: Client, request: Request) -> Serving | None:
        """Another process of this gateway asks; it has looked at the key."""
        try:
            self._own(client, request)
        except HeadraceError as error:
            client.refuse(error, request.path)
        return None

    async def _together(self, client: Client, request: Request, siblings: Siblings) -> None:
        """Answer what every process knows a part of."""
        path, own = request.path, Kept()
        try:
            self._own(own, request)
        except HeadraceError as error:
            own.answer(error.status, [JSON], msgspec.json.encode(body_of(error, path)))
        method, target = request.method.decode(), request.target.decode("latin-1")
        others = await siblings.ask(method, target, request.body)
        good = [body for status, body in ((own.status, own.body), *others) if status == 200]
        if not good:
            client.answer(own.status, [JSON], own.body)
        elif path == "/metrics":
            client.answer(200, own.headers, merged(good))
        elif path in JOINED:
            told = joined(request.target, [msgspec.json.decode(body) for body in good])
            client.answer(200, [JSON], msgspec.json.encode(told))
        elif path == "/gateway/drain":
            said = [msgspec.json.decode(body) for body in good]
            whole = {**said[0], "requests": sum(one["requests"] for one in said)}
            client.answer(200, [JSON], msgspec.json.encode(whole))
        else:
            told = one_of([msgspec.json.decode(body) for body in good])
            client.answer(200, [JSON], msgspec.json.encode(told))

    def _own(self, client: Answering, request: Request) -> None:
        """Answer what the gateway itself knows."""
        path = request.path
        if path == "/gateway/drain":
            self._only(request, b"POST")
            status, said = self._drain_worker(request.body)
        elif path == "/metrics":
            self._only(request, b"GET")
            kind = (b"content-type", CONTENT_TYPE.encode())
            client.answer(200, [kind], self.metrics.expose())
            return
        elif path.startswith(DECISIONS):
            self._only(request, b"GET")
            told = self.decisions.tell(unquote(path.removeprefix(DECISIONS)))
            if told is None:
                raise NotFound("no such decision is kept", code="decision_not_found")
            status, said = 200, told
        elif path in self.console.routes:
            self._only(request, b"GET")
            status, said = 200, self.console.tell(request.target)
        elif path in self._routes:
            self._only(request, b"GET")
            status, said = self._routes[path]()
        else:
            raise NotFound(f"no route {path}", code="route_not_found")
        client.answer(status, [JSON], msgspec.json.encode(said))

    def _page(self, client: Client, request: Request) -> None:
        """The fleet page, if there is one."""
        if not self.settings.ui:
            raise NotFound("the fleet page is off", code="route_not_found")
        self._only(request, b"GET")
        page.check(self.settings.host, self.doorkeeper.keyed, request)
        page.answer(client, request)

    @staticmethod
    def _only(request: Request, method: bytes) -> None:
        if request.method != method:
            raise WrongMethod(f"{request.path} takes {method.decode()}")

    def _ready(self) -> tuple[int, Any]:
        now_s = time.monotonic()
        able = sum(worker.may_take(now_s) for worker in self.fleet.workers.values())
        if self.draining:
            return 503, {"status": "draining", "workers": able}
        return (200 if able else 503), {"status": "ready" if able else "no worker", "workers": able}

    def _models(self) -> tuple[int, Any]:
        return 200, {"object": "list", "data": list(self.fleet.models().values())}

    def _drain_worker(self, body: bytes) -> tuple[int, Any]:
        """{"worker": URL, "drain": true}: it takes nothing new until told otherwise."""
        try:
            asked = read_json(body, _Drain)
        except Malformed as error:
            raise refusal(body, error) from None
        worker = self.fleet.workers.get(asked.worker.rstrip("/"))
        if worker is None:
            raise NotFound(f"no worker {asked.worker}", param="worker", code="worker_not_found")
        worker.draining = asked.drain
        return 200, {"worker": worker.name, "draining": asked.drain, "requests": len(worker.leases)}

    # ------------------------------------------------------------ told by exchanges

    def _tokenised(self, outcome: str) -> None:
        self.metrics.tokenised.add(outcome)

    def decided(
        self, exchange: Exchange, after_s: float, tenant: str, prompt: Prompt, placed: Placement
    ) -> None:
        """A worker was chosen, so many seconds after the request came."""
        metrics = self.metrics
        metrics.decide_s.observe(after_s)
        metrics.placements.add(placed.worker.name, placed.choice.reason)
        self.decisions.decided(exchange.number, exchange.id, after_s, tenant, prompt, placed)

    def used(
        self, exchange: Exchange, tenant: str, prompt: Prompt, placed: Placement, usage: Usage
    ) -> None:
        """A worker said what the request used."""
        metrics = self.metrics
        predicted = placed.cached_tokens[placed.choice.index]
        state = placed.states[placed.choice.index]
        metrics.tokens.add("predicted_cached", by=predicted)
        if usage.prompt_tokens > 0:
            metrics.tokens.add("prompt", by=usage.prompt_tokens)
            self.reader.learn(prompt, usage.prompt_tokens)
        if usage.output_tokens > 0:
            metrics.tokens.add("output", by=usage.output_tokens)
        if usage.cached_tokens >= 0:
            metrics.tokens.add("cached", by=usage.cached_tokens)
            off = usage.cached_tokens - predicted
            outcome = "under" if off > 0 else "over" if off else "equal"
            metrics.predictions.add(state, outcome)
            if predicted >= MIN_MISS_TOKENS and not usage.cached_tokens:
                metrics.misses.add(state)
        self.decisions.used(exchange.number, usage)
        if self.lint is not None and self.lint.see(tenant, prompt):  # in no request's way
            look = self.lint.look
            asyncio.get_running_loop().call_soon(look, tenant, exchange.id, prompt, usage)

    def ended(self, exchange: Exchange, status: int) -> None:
        """A request is over."""
        took_s = time.monotonic() - exchange.since_s
        self.metrics.requests.add(str(status))
        self.metrics.e2e_s.observe(took_s)
        self.decisions.ended(exchange.number, status, took_s)
        self.exchanges.discard(exchange)
        self.pump_soon()
        if not self.exchanges:
            self._idle.set()


class _Drain(msgspec.Struct):
    worker: str
    drain: bool = True


async def serve(
    settings: GatewaySettings,
    registry: Registry,
    doorkeeper: Doorkeeper,
    sock: socket.socket,
    ready: Callable[[Gateway], None],
    siblings: Siblings | None = None,
    board: Board | None = None,
    models: Mapping[str, ModelTokens] | None = None,
) -> None:
    """Run a gateway until SIGTERM or SIGINT. Call in the main thread. See `Gateway`."""
    gateway = Gateway(settings, registry, doorkeeper, siblings, board, models)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gateway.stop)
    await gateway.run(sock, ready)

"""One worker as the gateway knows it, and the leases of the requests that are there."""

from __future__ import annotations

from headrace.gateway.breaker import Breaker
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.upstream import Pool
from headrace.gateway.view import WorkerView

RATE_SHARE = 0.2  # of a new measurement in the prefill rate
MIN_RATE_TOKENS = 256  # shorter prompts measure latency, not rate
MIN_WARM = 0.05


class Worker:
    """Counts change through leases alone, so no path can count twice or forget."""

    def __init__(self, spec: WorkerSpec, settings: GatewaySettings) -> None:
        self.spec = spec
        self.name = spec.url.rstrip("/")
        host, port = spec.address
        self.host = f"{host}:{port}".encode()
        self.pool = Pool(host, port, settings.connect_timeout_s)
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s)
        self.hung_after_s = spec.hung_after_s or settings.hung_after_s
        self.up = False  # the last check succeeded
        self.draining = False
        self.gone = False  # no longer in the registry
        self.models: tuple[str, ...] = spec.models
        self.cards: dict[str, object] = {}  # model -> what it says of it in /v1/models
        self.why = "not checked yet"
        self.up_since_s = 0.0
        self.leases: set[Lease] = set()
        self.waiting = self.pending_tokens = self.decode_tokens = 0
        self.last_placed = self.last_cold = 0
        self.kv_usage = 0.0
        self.prefill_tokens_per_s = 0.0
        self._slow_start_s = settings.slow_start_s

    def may_take(self, now_s: float) -> bool:
        """Whether a new request may go here."""
        return self.up and not self.draining and not self.gone and self.breaker.admits(now_s)

    @property
    def has_room(self) -> bool:
        """One more request would not have to wait there."""
        return not self.spec.max_requests or len(self.leases) < self.spec.max_requests

    def serves(self, model: str) -> bool:
        """Whether it has that model; "" = any will do."""
        return not model or model in self.models

    def view(self, now_s: float) -> WorkerView:
        """What policies see."""
        warm = 1.0
        if self._slow_start_s:
            warm = max(MIN_WARM, min(1.0, (now_s - self.up_since_s) / self._slow_start_s))
        return WorkerView(
            name=self.name,
            requests=len(self.leases),
            waiting=self.waiting,
            pending_tokens=self.pending_tokens,
            decode_tokens=self.decode_tokens,
            kv_usage=self.kv_usage,
            warm=warm,
            last_placed=self.last_placed,
            last_cold=self.last_cold,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
        )


class Lease:
    """A request's share of a worker's load, from its placement to its end. Ends once."""

    __slots__ = (
        "_before_tokens",
        "_begun",
        "prompt_tokens",
        "silent",
        "since_s",
        "uncached_tokens",
        "worker",
    )

    def __init__(
        self,
        worker: Worker,
        prompt_tokens: int,
        uncached_tokens: int,
        number: int,
        now_s: float,
        silent: bool = False,
    ) -> None:
        """number: of this placement among all. silent: its first token will not show."""
        self.silent = silent
        self.worker, self.since_s = worker, now_s
        self.prompt_tokens, self.uncached_tokens = prompt_tokens, uncached_tokens
        self._begun = False
        worker.leases.add(self)
        worker.waiting += 1
        worker.pending_tokens += uncached_tokens
        self._before_tokens = worker.pending_tokens
        worker.last_placed = number
        worker.breaker.placed()

    def begin(self, now_s: float) -> None:
        """The first token came: its prompt is computed, its context decodes."""
        if self._begun or self not in self.worker.leases:
            return
        worker = self.worker
        self._decodes()
        if self._before_tokens >= MIN_RATE_TOKENS and now_s > self.since_s:
            rate = self._before_tokens / (now_s - self.since_s)
            old = worker.prefill_tokens_per_s or rate
            worker.prefill_tokens_per_s = old + RATE_SHARE * (rate - old)

    def assume(self, now_s: float) -> None:
        """A silent one is thought to decode once its prompt can have been computed."""
        rate = self.worker.prefill_tokens_per_s
        passed_s = now_s - self.since_s
        if self.silent and rate and not self._begun and passed_s * rate >= self._before_tokens:
            self._decodes()

    def _decodes(self) -> None:
        worker, self._begun = self.worker, True
        worker.waiting -= 1
        worker.pending_tokens -= self.uncached_tokens
        worker.decode_tokens += self.prompt_tokens

    def end(self) -> None:
        """It left, one way or another. A second call does nothing."""
        worker = self.worker
        if self not in worker.leases:
            return
        worker.leases.remove(self)
        worker.breaker.released()
        if self._begun:
            worker.decode_tokens -= self.prompt_tokens
        else:
            worker.waiting -= 1
            worker.pending_tokens -= self.uncached_tokens

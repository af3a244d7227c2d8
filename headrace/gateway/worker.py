"""One worker as the gateway knows it."""

from __future__ import annotations

from headrace.gateway.breaker import Breaker
from headrace.gateway.load import Lease, Load
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.upstream import Pool
from headrace.gateway.view import WorkerView

MIN_WARM = 0.05


class Worker(Load):
    """Its load, its connections, its health."""

    def __init__(self, spec: WorkerSpec, settings: GatewaySettings, *, new: bool = True) -> None:
        """new: it comes while the gateway runs. Nobody knows how long one has been up that was
        there before, so that one gets its full share at once.
        """
        super().__init__()
        self.new = new
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
        self.kv_usage = 0.0
        self._slow_start_s = settings.slow_start_s

    def may_take(self, now_s: float) -> bool:
        """Whether a new request may go here."""
        if not self.up or self.draining or self.gone:
            return False
        return self.breaker.closed or self.breaker.admits(now_s)

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
        if now_s < self.up_since_s + self._slow_start_s:
            warm = max(MIN_WARM, round((now_s - self.up_since_s) / self._slow_start_s, 1))
        return WorkerView(
            name=self.name,
            requests=len(self.leases),
            waiting=self.waiting,
            pending_tokens=self.left_tokens(now_s),
            decode_tokens=self.decode_tokens,
            kv_usage=self.kv_usage,
            warm=warm,
            last_placed=self.last_placed,
            last_cold=self.last_cold,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
        )

    def added(self, lease: Lease, number: int) -> None:
        """See `Load`."""
        super().added(lease, number)
        if not self.breaker.closed:
            self.breaker.placed()

    def removed(self, lease: Lease) -> None:
        """See `Load`."""
        super().removed(lease)
        if not self.breaker.closed:
            self.breaker.released()

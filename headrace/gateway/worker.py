"""One worker as the gateway knows it."""

from __future__ import annotations

from urllib.parse import urlsplit

from headrace.gateway.board import Board, key_of
from headrace.gateway.breaker import Breaker
from headrace.gateway.load import Lease, Load
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.starts import Started
from headrace.gateway.trust import trusted
from headrace.gateway.upstream import Pool
from headrace.gateway.view import WorkerView
from headrace.homes import tag_of

MIN_WARM = 0.05
NOT_CHECKED = "not checked yet"


class Worker(Load):
    """Its load, its connections, its health."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: GatewaySettings,
        *,
        new: bool = True,
        board: Board | None = None,
    ) -> None:
        """new: it comes while the gateway runs. Nobody knows how long one has been up that was
        there before, so that one gets its full share at once. board: other processes route to it.
        """
        super().__init__()
        self.new = new
        self._board, self._key = board, key_of(spec.url.rstrip("/"))
        self._row = board.enter(self._key) if board is not None else -1
        self.spec = spec
        self.name = spec.url.rstrip("/")
        self.tag = tag_of(self.name)  # in the ids of what it keeps
        host, port = spec.address
        shown = spec.host or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self.host = shown.encode()
        tls = trusted(spec.ca_file) if spec.secure else None
        name = urlsplit(f"//{shown}").hostname or host  # whose certificate it has to show
        self.pool = Pool(host, port, settings.connect_timeout_s, tls=tls, name=name)
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s)
        self.hung_after_s = spec.hung_after_s or settings.hung_after_s
        self.up = False  # the last check succeeded
        self.draining = False
        self.gone = False  # no longer in the registry
        self.models: tuple[str, ...] = spec.models
        self.cards: dict[str, object] = {}  # model -> what it says of it in /v1/models
        self.why = NOT_CHECKED
        self.up_since_s = 0.0
        self.kv_usage: float | None = None  # share that is taken; None = unknown
        self.start = Started(self.name, spec.start) if spec.start is not None else None
        self._slow_start_s = settings.slow_start_s

    def may_take(self, now_s: float) -> bool:
        """Whether a new request may go here."""
        return not (self.draining or self.gone) and self.answers(now_s)

    def answers(self, now_s: float) -> bool:
        """Whether it can be asked for what it keeps; it may be draining."""
        return self.up and (self.breaker.closed or self.breaker.admits(now_s))

    @property
    def resumes(self) -> bool:
        """A client can come back to its streams; else a Last-Event-ID begins a new one."""
        cards = [card for card in self.cards.values() if isinstance(card, dict)]
        return any(card.get("stream_resume_s") for card in cards)

    def why_not(self, now_s: float) -> str:
        """What keeps a new request away; "" = nothing."""
        if not self.up:
            return "down"
        if self.draining or self.gone:
            return "draining"
        if not (self.breaker.closed or self.breaker.admits(now_s)):
            return "breaker open"
        return "" if self.has_room else "full"

    def comes(self, now_s: float) -> bool:
        """Not up, but it will be: the gateway starts it, from now on if not before."""
        return (
            self.start is not None
            and not (self.up or self.draining or self.gone)
            and self.start.want(now_s)
        )

    @property
    def has_room(self) -> bool:
        """One more request would not have to wait there."""
        if not self.spec.max_requests:
            return True
        elsewhere = self._board.others(self._key)[0] if self._board is not None else 0
        return len(self.leases) + elsewhere < self.spec.max_requests

    def serves(self, model: str) -> bool:
        """Whether it has that model; "" = any will do."""
        return not model or model in self.models

    def view(self, now_s: float) -> WorkerView:
        """What policies see."""
        warm = 1.0
        if now_s < self.up_since_s + self._slow_start_s:
            warm = max(MIN_WARM, round((now_s - self.up_since_s) / self._slow_start_s, 1))
        requests = waiting = pending = decode = 0  # of other processes
        if self._board is not None:
            requests, waiting, pending, decode = self._board.others(self._key)
        return WorkerView(
            name=self.name,
            requests=len(self.leases) + requests,
            waiting=self.waiting + waiting,
            pending_tokens=self.left_tokens(now_s) + pending,
            decode_tokens=self.decode_tokens + decode,
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
        if self._board is not None:
            self._tell(self._board)

    def moved(self, lease: Lease, now_s: float, *, seen: bool = True) -> None:
        """See `Load`."""
        super().moved(lease, now_s, seen=seen)
        if self._board is not None:
            self._tell(self._board)

    def removed(self, lease: Lease) -> None:
        """See `Load`."""
        super().removed(lease)
        if not self.breaker.closed:
            self.breaker.released()
        if self._board is not None:
            self._tell(self._board)
            if self.gone and not self.leases:
                self._leave(self._board)

    def leaves(self) -> None:
        """It is no longer in the registry: nothing new goes there."""
        self.gone = True
        self.pool.close()
        if self._board is not None and not self.leases:
            self._leave(self._board)

    def _tell(self, board: Board) -> None:
        if self._row >= 0:
            counts = (len(self.leases), self.waiting, self.pending_tokens, self.decode_tokens)
            board.write(self._row, counts)

    def _leave(self, board: Board) -> None:
        board.leave(self._row)
        self._row = -1

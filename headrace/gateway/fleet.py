"""The workers together: who is there, and where a request goes."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from headrace.errors import HeadraceError, NotFound, NoWorker, TargetMissed
from headrace.gateway.beliefs import Beliefs, cache_tokens
from headrace.gateway.board import Board
from headrace.gateway.event_feed import State
from headrace.gateway.kept import Kept
from headrace.gateway.load import Lease
from headrace.gateway.policy import POLICIES, predicted_ttft_s
from headrace.gateway.prefix_index import PrefixIndex
from headrace.gateway.prompt import Prompt
from headrace.gateway.registry import Registry, StaticRegistry
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.view import Ask, Choice, FleetView, Knobs
from headrace.gateway.worker import NOT_CHECKED, Worker

log = logging.getLogger("headrace.gateway")

KEPT = Choice(0, "kept", (math.inf,))  # one worker has what is asked for: no other was looked at


class NoRoom(NoWorker):
    """Workers are there, and all have as many requests as they take at once; or one is coming."""


class Placement(msgspec.Struct, frozen=True):
    """One decision, with all that it was made from."""

    worker: Worker
    lease: Lease
    view: FleetView
    choice: Choice
    cached_tokens: tuple[int, ...]  # predicted, by worker of the view
    states: tuple[State, ...]  # of what is known there, by worker of the view
    old_names: tuple[tuple[str, str, float], ...] = ()  # name that no longer resolves, why, age_s
    left_out: tuple[tuple[str, str], ...] = ()  # workers with the model that were none, and why


class Fleet:
    """Workers by name. A registry calls `apply` with what there should be."""

    def __init__(self, settings: GatewaySettings, board: Board | None = None) -> None:
        """board: other processes route to the same workers."""
        self._settings, self._board = settings, board
        self._policy = POLICIES[settings.policy]
        self.knobs = Knobs(affinity=settings.affinity, decode_weight=settings.decode_weight)
        self._random = random.Random()
        self._placed = 0
        self._begun = False  # the first list of workers is here
        self.index = PrefixIndex(settings.index_bytes)
        self.beliefs = Beliefs(settings, self.index)
        self.registry: Registry = StaticRegistry(())  # where the workers come from
        self.workers: dict[str, Worker] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.changed: list[Callable[[Worker], None]] = []  # called when a worker goes down

    def apply(self, specs: Sequence[WorkerSpec]) -> None:
        """Workers come and go. One that goes takes nothing new; its requests end in peace."""
        wanted = {spec.url.rstrip("/"): spec for spec in specs}
        for name, worker in list(self.workers.items()):
            if wanted.get(name) != worker.spec:
                log.info("worker %s leaves", name)
                worker.leaves()
                self._stop(worker)
                self.index.remove_worker(name)
                self.beliefs.remove_worker(name)
                del self.workers[name]
        for name, spec in wanted.items():
            if name not in self.workers:
                log.info("worker %s comes", name)
                worker = self.workers[name] = Worker(
                    spec, self._settings, new=self._begun, board=self._board
                )
                if spec.start is not None and spec.start.warm:
                    worker.comes(time.monotonic())
                self.index.add_worker(name)
                self.beliefs.add_worker(name)
        self._begun = True

    def _stop(self, worker: Worker) -> None:
        """End its process, if it is ours."""
        if worker.start is not None:
            ending = asyncio.get_running_loop().create_task(worker.start.stop())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def stopped(self) -> None:
        """All processes of workers that left have ended."""
        await asyncio.gather(*self._ending)

    def start_s(self, model: str) -> float:
        """How long a start may take that requests for this model wait for; 0 = none is under way,
        or there is a worker that takes them now."""
        serving = [worker for worker in self.workers.values() if worker.serves(model)]
        if any(worker.up for worker in serving):
            return 0.0
        starts = [w.start for w in serving if w.start is not None and w.start.state == "starting"]
        return max((start.spec.timeout_s for start in starts), default=0.0)

    def models(self) -> dict[str, object]:
        """What workers say of their models; a model of several is told once."""
        cards: dict[str, object] = {}
        for worker in self.workers.values():
            for model in worker.models:
                cards.setdefault(model, worker.cards.get(model) or {"id": model, "object": "model"})
        return cards

    def place(self, prompt: Prompt, tried: Collection[str]) -> Placement:
        """Choose a worker and take a lease on it.

        Raises NotFound, NoRoom, NoWorker or TargetMissed; InvalidRequest for a conversation that
        was kept by a worker that left.
        """
        now_s = time.monotonic()
        if prompt.kept is None:
            free = self._free(prompt, tried, now_s)
        else:
            free = [self._keeper(prompt, prompt.kept, now_s)]
        view = FleetView(tuple([worker.view(now_s) for worker in free]))
        cached, states = self.beliefs.cached(prompt, free)
        if prompt.ttft_target_s:
            self._check_target(prompt, view, cached)
        ask = Ask(
            prompt_tokens=prompt.prompt_tokens,
            cached_tokens=cached,
            draw=self._random.random(),
            prefix_key=prompt.prefix_key,
            session=prompt.session,
        )
        choice = self._policy(view, ask, self.knobs) if prompt.kept is None else KEPT
        worker = free[choice.index]
        self._placed += 1
        if prompt.computes:
            uncached = prompt.prompt_tokens - cached[choice.index]
            lease = Lease(
                worker, prompt.prompt_tokens, uncached, self._placed, now_s, not prompt.streams
            )
            computed_s = predicted_ttft_s(view.workers[choice.index], uncached, self.knobs)
            lease.computed = self._will_hold(worker, prompt, now_s, computed_s)
        else:
            lease = Lease(worker, 0, 0, self._placed, now_s)
            lease.begin(now_s)
        if choice.cold:
            worker.last_cold = self._placed
        names = self.registry.names
        old = tuple([(n.url, n.why, n.age_s(now_s)) for n in names if n.why]) if names else ()
        others = choice is not KEPT and len(free) < len(self.workers)
        left_out = self._left_out(prompt, free, now_s) if others else ()
        return Placement(worker, lease, view, choice, cached, states, old, left_out)

    def _free(self, prompt: Prompt, tried: Collection[str], now_s: float) -> list[Worker]:
        """Who may take it; at least one. Raises as `place`."""
        free = [
            worker
            for worker in self.workers.values()
            if worker.serves(prompt.model)
            and worker.may_take(now_s)
            and worker.has_room
            and worker.name not in tried
        ]
        if not free:
            raise self._nowhere(prompt, tried, now_s)
        return free

    def _keeper(self, prompt: Prompt, kept: Kept, now_s: float) -> Worker:
        """The worker that has it, though it may be draining. Raises as `place`."""
        for worker in self.workers.values():
            if worker.tag == kept.tag:
                break
        else:
            raise kept.missing()
        if not worker.answers(now_s):
            raise kept.away()
        if prompt.names_event and worker.draining and not worker.resumes:
            raise NoWorker("no worker can take this request now")  # there it would begin a stream
        if kept.computes and not worker.serves(prompt.model):
            raise NotFound(
                f"the worker that has {kept.name!r} serves no model {prompt.model!r:.100}",
                param="model",
            )
        if prompt.waits and not worker.has_room:
            raise NoRoom("the worker has as many requests as it takes at once")
        return worker

    def _will_hold(
        self, worker: Worker, prompt: Prompt, now_s: float, computed_s: float
    ) -> Callable[[], None] | None:
        """The prompt went there and should be computed after so many seconds. See
        `Beliefs.placed`."""
        if tokens := cache_tokens(worker, prompt.model):
            most = int(tokens / prompt.chunk_tokens)
            self.index.set_capacity(worker.name, max(1, most))
        self.index.insert(prompt.chain, worker.name, prompt.fine_chunks)
        return self.beliefs.placed(prompt, worker, now_s, computed_s)

    def _left_out(
        self, prompt: Prompt, free: Collection[Worker], now_s: float
    ) -> tuple[tuple[str, str], ...]:
        return tuple(
            (worker.name, worker.why_not(now_s) or "tried before")
            for worker in self.workers.values()
            if worker not in free and worker.serves(prompt.model)
        )

    def _nowhere(self, prompt: Prompt, tried: Collection[str], now_s: float) -> HeadraceError:
        """Why no worker is there for it; one that can be started is."""
        serving = [worker for worker in self.workers.values() if worker.serves(prompt.model)]
        coming = any(worker.comes(now_s) for worker in serving)  # one more, not all
        if any(w.may_take(now_s) and w.name not in tried for w in serving):
            return NoRoom("every worker has as many requests as it takes at once")
        if coming:
            return NoRoom("the model's worker is being started")
        if not serving and any(worker.models for worker in self.workers.values()):
            return NotFound(f"no worker serves the model {prompt.model!r}", param="model")
        return NoWorker("no worker can take this request now")

    def _check_target(self, prompt: Prompt, view: FleetView, cached: Sequence[int]) -> None:
        """Refuse early what would be late everywhere."""
        predicted_s = min(
            predicted_ttft_s(worker, prompt.prompt_tokens - held, self.knobs)
            for worker, held in zip(view.workers, cached, strict=True)
        )
        if predicted_s > prompt.ttft_target_s:
            raise TargetMissed(
                f"the first token is expected after {predicted_s:.3g} s, "
                f"{prompt.ttft_target_s:g} s are allowed"
            )

    # ------------------------------------------------------------ health

    def came_up(self, worker: Worker) -> None:
        """A check succeeded. One that was down has lost its cache, as far as we know."""
        if worker.up or worker.gone or (worker.start is not None and worker.start.ending):
            return
        log.info("worker %s is up: %s", worker.name, ", ".join(worker.models) or "no model")
        worker.up, worker.why = True, ""
        worker.up_since_s = time.monotonic() if worker.new else -math.inf
        worker.new = True
        worker.breaker.succeeded()
        if worker.start is not None:
            worker.start.came_up()
        self.index.forget(worker.name)
        self.beliefs.came_up(worker)

    def keep(self, worker: Worker, now_s: float, busy: bool) -> None:
        """Start it or stop it, if its process is ours; called about once a second."""
        if worker.start is not None:
            worker.start.tick(now_s, busy or bool(worker.leases))
            if worker.start.ending:
                self.went_down(worker, "it is stopped, for it was idle")

    def went_down(self, worker: Worker, why: str) -> None:
        """No new requests. Those that are there go on: it may only be busy."""
        first = worker.why == NOT_CHECKED and worker.start is None  # ours take a while to come
        if worker.up or first:
            log.warning("worker %s is out: %s", worker.name, why)
        worker.up, worker.why = False, why

    def hangs(self, worker: Worker) -> None:
        """It says nothing at all: its requests are ended."""
        if worker.leases:
            log.warning("worker %s hangs: %d requests end", worker.name, len(worker.leases))
        worker.pool.close()
        for tell in self.changed:
            tell(worker)

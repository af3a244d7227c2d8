"""Engine: plan, run, apply; in two loops that give the same tokens.

plain     plan N, run N, apply N
overlap   plan and launch N+1 while N runs, then apply N; `_in_flight` carries N to the next turn

A step draws at once, unless a request with a grammar lives: then N+1 draws when N was applied, and
its masks are made while its forward pass runs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from headrace.config import Settings
from headrace.engine.budget import budget_for
from headrace.engine.draft import Flight
from headrace.engine.kv_events import KVEventPublisher
from headrace.engine.masker import Masker
from headrace.engine.meter import Meter
from headrace.engine.pace import Pace
from headrace.engine.protocol import Grammars, Masks, Runner, Ticket
from headrace.engine.registry import Registry
from headrace.engine.scheduler import Scheduler
from headrace.engine.shares import FS
from headrace.engine.stats import EngineStats, StepTimes, Tally
from headrace.kv.cache import KVCache
from headrace.messages import Abort, Finish, Look, StepPlan, StepResult, Submit, TokenOut

log = logging.getLogger(__name__)


class InFlight:
    """A step between its launch and its result."""

    __slots__ = ("_finished", "flight", "launched_s", "plan_s", "ticket")

    def __init__(self, flight: Flight, ticket: Ticket, plan_s: float, launched_s: float) -> None:
        self.flight, self.ticket = flight, ticket
        self.plan_s, self.launched_s = plan_s, launched_s
        self._finished = False

    def finish(self, masks: Masks | None) -> None:
        """Let it draw."""
        self._finished = True
        self.ticket.finish(masks)

    def result(self) -> StepResult:
        """Wait for it. A step that was never let draw draws without masks, for nobody."""
        if not self._finished:
            self.finish(None)
        return self.ticket.result()


class Engine:
    """Serves requests of several owners (API processes) on one runner.

    Not thread-safe: one thread submits, aborts and turns. Whatever is submitted between two turns
    is seen by the next one.

    settings: settled ones. itl_target_s: the longest step while sequences decode, by the runner's
    own prediction; 0 = no limit. prompts_first: see `engine.scheduler`.
    """

    def __init__(
        self,
        settings: Settings,
        kv: KVCache,
        runner: Runner,
        *,
        overlap: bool,
        itl_target_s: float = 0.0,
        prompts_first: bool = False,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[StepPlan, StepResult], None] | None = None,
        publisher: KVEventPublisher | None = None,
    ) -> None:
        capacity = runner.capacity
        assert capacity.kv_blocks == [kv.size], f"{kv.size} blocks, runner {capacity.kv_blocks}"
        assert capacity.block_size == kv.block_size, "block sizes of cache and runner differ"
        assert capacity.windows == kv.windows, "KV groups of cache and runner differ"
        self.kv = kv
        self.runner = runner
        self._tally = Tally()
        assert min(settings.max_num_seqs, settings.max_num_batched_tokens) > 0, "not settled"
        budget = budget_for(capacity.cost, settings.max_num_batched_tokens, itl_target_s)
        self.scheduler = Scheduler(settings, kv, capacity, budget, self._tally)
        self.scheduler.prompts_first = prompts_first
        self._in_flight: deque[InFlight] = deque()  # plain: empty between turns; overlap: <= 1
        self.meter = Meter(capacity.work, self._in_flight)
        self._pace = Pace()
        self.registry = Registry(
            settings, kv, capacity, self.scheduler, self._tally, self.meter, grammars
        )
        self._recorder = self.registry.recorder
        self._grammars = grammars
        self._masker = Masker(grammars, capacity) if grammars is not None else None
        self._clock = clock
        self._on_step = on_step
        self._publisher = publisher
        self._watch: Callable[[StepTimes], None] | None = None
        self._step = self._step_overlap if overlap else self._step_plain
        self._broken_in_a_row = 0

    def watch(self, told: Callable[[StepTimes], None]) -> None:
        """From now on, tell where the time of each step went that is applied."""
        self._watch = told

    def submit(self, owner: int, msg: Submit) -> None:
        """Queue a request. What cannot run is answered by a Done in the next turn."""
        self.registry.submit(owner, msg, self._clock())

    def abort(self, owner: int, msg: Abort) -> None:
        """End a request now, wherever it is; its End and Done come with the next turn."""
        self.registry.abort(owner, msg.handle)

    def finish(self, owner: int, msg: Finish) -> None:
        """End one choice at a stop string; tokens past it that were sent do not count."""
        self.registry.finish(owner, msg.handle, msg.choice, msg.n_tokens)

    def look(self, owner: int, msg: Look) -> None:
        """Somebody watches: the next turn says what there is to see."""
        self._recorder.look(owner, msg, self.stats(), self._clock())

    def drop_owner(self, owner: int) -> None:
        """An API process is gone: its requests end, and nothing more is said to it."""
        self.registry.drop_owner(owner)

    def warm(self) -> None:
        """Get ready, in the background, for what the first request that needs it would wait for."""
        if self._grammars is not None:
            self._grammars.warm()

    @property
    def has_work(self) -> bool:
        """A turn would do or say something."""
        registry = self.registry
        return (
            bool(self._in_flight or registry.outbox or len(registry.compiling))
            or self.scheduler.has_work
        )

    def turn(self) -> dict[int, TokenOut]:
        """One turn of the loop: owner -> what it is told. {} when there is nothing to say.

        Raises what the runner raised if two steps in a row break.
        """
        if self.registry.compiling:
            self._take_compiled()
        self._step()
        if self._publisher is not None and (events := self.kv.take_events()):
            self._publisher.put(events)
        return self.registry.outbox.take()

    def _take_compiled(self) -> None:
        if not (self._in_flight or self.registry.outbox or self.scheduler.has_work):
            self.registry.compiling.pause()
        self.registry.admit_compiled(self._clock())

    def idle(self) -> bool:
        """Let the runner do a little of what it put off; False: nothing was left.

        Needs: not `has_work`. Whoever never calls it loses no token.
        """
        assert not self.has_work, "idle, but there is work"
        self._recorder.idle(self._clock())
        return self.runner.idle()

    def spare_s(self) -> float:
        """Seconds for which the next turn may wait without leaving the device idle; 0 where there
        is something to say."""
        if not self._in_flight or self.registry.outbox:
            return 0.0
        queue = self.scheduler.queue
        return self._pace.spare_s(self._clock(), len(queue), queue.tokens)

    def _step_plain(self) -> None:
        if self._launch() and self._finish():
            self._land()

    def _step_overlap(self) -> None:
        launched = self._launch()
        masked = launched and self.registry.constrained > 0
        if launched and not masked:
            launched = self._finish()
        if len(self._in_flight) > launched:
            self._land()
        if masked:  # its masks depend on the tokens that have just landed
            self._finish()

    def _launch(self) -> bool:
        """Plan a step and start it. False if there is none to plan, or it broke."""
        begun_s = self._clock()
        flight = self.scheduler.schedule(begun_s)
        if flight is None:
            stuck = not self._in_flight and self.scheduler.has_work
            assert not stuck, "sequences wait or run, but no step can be planned"
            return False
        if self._recorder.active:
            self._recorder.launched(flight, self._waiting, begun_s)
        planned_s = self._clock()
        try:
            ticket = self.runner.launch(flight.plan)
        except Exception as error:
            self._recover(flight, error)
            return False
        self._in_flight.append(InFlight(flight, ticket, planned_s - begun_s, planned_s))
        self._pace.launched(flight.plan, begun_s, self._clock())
        return True

    def _finish(self) -> bool:
        """Let the newest step in flight draw. False if it broke, or went with one before it."""
        if not self._in_flight:
            return False
        newest = self._in_flight[-1]
        try:
            newest.finish(self._masks(newest))
        except Exception as error:
            self._in_flight.pop()
            self._recover(newest.flight, error)
            return False
        return True

    def _masks(self, newest: InFlight) -> Masks | None:
        """Needs: every step before it was applied, if a request with a grammar lives."""
        if self._masker is None or not self.registry.constrained:
            return None
        masks, complete = self._masker.masks(newest.flight, newest.ticket)
        self.registry.give_up(newest.flight)
        self.registry.complete(newest.flight, complete)
        return masks if masks.draws else None

    def _land(self) -> None:
        """Wait for the oldest step in flight and apply it."""
        oldest = self._in_flight.popleft()
        asked_s = self._clock()
        try:
            result = oldest.result()
        except Exception as error:
            self._recover(oldest.flight, error)
        else:
            waited_s = result.waited_s
            self._pace.landed(oldest.flight.plan, result.busy_s, waited_s, asked_s + waited_s)
            self._apply(oldest, result)

    def _apply(self, entry: InFlight, result: StepResult) -> None:
        self._broken_in_a_row = 0
        flight, plan, now_s = entry.flight, entry.flight.plan, self._clock()
        if self._recorder.active:
            self._recorder.landed(flight, result, now_s)
        self.registry.apply(flight, result, now_s)
        if flight.prediction is not None:
            self.scheduler.budget.learn(flight.prediction, result.busy_s)
        if self._watch is not None:
            apply_s, wall_s = self._clock() - now_s, now_s - entry.launched_s
            busy_s, sample_s = result.busy_s, result.sample_s
            tokens = sum(plan.counts)
            self._watch(StepTimes(tokens, entry.plan_s, busy_s, sample_s, apply_s, wall_s))
        if self._on_step is not None:
            self._on_step(plan, result)

    def _recover(self, broken: Flight, error: Exception) -> None:
        """A step broke as a whole. Whoever owns a row fails; whoever waits is served after it.

        Steps launched before the broken one are applied, those after it are only waited for.
        Raises `error` if the step before it broke too: the runner cannot go on.
        """
        log.error("step %d broke", broken.plan.step, exc_info=error)
        lost = [broken]
        while self._in_flight:
            entry = self._in_flight.popleft()
            flight = entry.flight
            try:
                result = entry.result()
            except Exception:
                log.error("step %d broke with it", flight.plan.step, exc_info=True)
                lost.append(flight)
                continue
            if flight.plan.step < broken.plan.step:
                self._apply(entry, result)
            else:
                lost.append(flight)
        self._broken_in_a_row += 1
        if self._broken_in_a_row > 1:
            raise error
        self.registry.fail_running(f"the step failed: {error}")
        self.scheduler.lost(lost)

    @property
    def _waiting(self) -> int:
        """Requests without a row."""
        return self.registry.live - self.scheduler.resident_requests

    def stats(self) -> EngineStats:
        """Gauges and counters at this moment."""
        tally, kv = self._tally, self.kv
        return EngineStats(
            running=self.scheduler.resident_requests,
            waiting=self._waiting,
            kv_blocks=kv.size,
            kv_used=kv.used_blocks,
            steps=tally.steps,
            preemptions=tally.preemptions,
            recomputed_tokens=tally.recomputed_tokens,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            generation_tokens=tally.generation_tokens,
            finished=dict(tally.finished),
            started=tally.started,
            runner=self.runner.counters(),
            busy_s=self.meter.busy_fs / FS,
            unclaimed_s=self.meter.unclaimed_fs / FS,
            kv_events=self._publisher.counts if self._publisher is not None else {},
            queried_tokens=tally.queried_tokens,
            prefill_tokens=tally.prefill_tokens,
            kv_tokens=kv.kept_tokens,
            step_factor=self.scheduler.budget.factor,
        )

    def close(self) -> None:
        """Wait for the steps in flight and free the device. Live requests hear nothing more."""
        while self._in_flight:
            entry = self._in_flight.popleft()
            try:
                entry.result()
            except Exception:
                log.warning("a step broke while the engine closed", exc_info=True)
        self.runner.close()
        if self._publisher is not None:
            self._publisher.stop()
        if self._grammars is not None:
            self._grammars.close()

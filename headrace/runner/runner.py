"""Computes steps: plan -> forward pass -> tokens.

One worker does all tensor work in the order it was asked for: a thread of its own, so that the
engine plans the next step while this one runs, or the engine's. The only shared state is inside
the tickets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.backends.cpu.batch import Batch, Forward, Logits, Peaks
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.engine.protocol import Capacity, Masks
from headrace.messages import NO_TOKEN_ALLOWED, Logprobs, Pool, StepPlan, StepResult
from headrace.runner.plan_check import check, refuse_unoffered, sources_of
from headrace.runner.rows import Rows
from headrace.runner.worker import Pending, Worker
from headrace.sampling.logprobs import report
from headrace.sampling.pipeline import NO_TOKEN, sample
from headrace.sampling.probe import Probe
from headrace.sampling.shaping import Bits

_FAILED_TOKEN = -1
_UNKNOWN = -1  # see `Ticket.likely`


class Computed(NamedTuple):
    """What the model says of a step. logits [rows drawn from, vocab_size] float32, in the order of
    their first draw, and what is known of them; None if nothing is drawn."""

    logits: Logits | None
    peaks: Peaks | None
    busy_s: float


class CpuTicket:
    """A step in flight; see `engine.protocol.Ticket`."""

    def __init__(self, runner: CpuRunner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan
        self._computed = runner.worker.submit(lambda: runner.forward(plan))
        self._result: Pending[StepResult] | None = None

    @property
    def finished(self) -> bool:
        """Whether `finish` was called."""
        return self._result is not None

    def likely(self) -> Sequence[int]:
        """See `engine.protocol.Ticket`: known where the worker computed while it was asked to."""
        if not self._computed.done():
            return ()
        try:
            peaks = self._computed.result().peaks
        except Exception:  # `result` raises it
            return ()
        return () if peaks is None else self._runner.likely(self._plan, peaks)

    def finish(self, masks: Masks | None = None) -> None:
        """Enqueue the sampler."""
        assert self._result is None, "a ticket is finished once"
        mine = None if masks is None else Masks(masks.draws, masks.bits.copy())
        self._result = self._runner.worker.submit(lambda: self._sample(mine))

    def _sample(self, masks: Masks | None) -> StepResult:
        computed = self._computed.result()  # done: one worker, in order
        return self._runner.draw(self._plan, computed, masks)

    def result(self) -> StepResult:
        """Wait for the step. Raises what broke it."""
        assert self._result is not None, "finish() comes before result()"
        asked_s = time.monotonic()
        result = self._result.result()
        return msgspec.structs.replace(result, waited_s=time.monotonic() - asked_s)


def table_width(capacity: Capacity) -> int:
    """Blocks of the longest sequence, and two: an overlapped step may run past the last token."""
    return -(-capacity.max_model_len // capacity.block_size) + 2


class CpuRunner:
    """A decoder-only model over one pool of KV blocks; see `engine.protocol.Runner`.

    Takes the worker: `close` ends it. With an inline one a step is computed while it is launched.
    """

    def __init__(
        self, forward: Forward, memory: KvMemory, capacity: Capacity, worker: Worker
    ) -> None:
        self._forward, self._memory, self._capacity = forward, memory, capacity
        self._rows = Rows(capacity.max_rows, table_width(capacity), len(capacity.windows))
        self._latest: CpuTicket | None = None
        self.worker = worker

    @property
    def capacity(self) -> Capacity:
        """What this runner offers."""
        return self._capacity

    def launch(self, plan: StepPlan) -> CpuTicket:
        """Start a step. Needs: `finish` was called on the ticket before.

        Raises EngineError for a kind of output that this runner does not offer.
        """
        assert self._latest is None or self._latest.finished, (
            f"step {plan.step} is launched before the one before it was finished"
        )
        refuse_unoffered(plan)
        self._latest = CpuTicket(self, plan)
        return self._latest

    def counters(self) -> Mapping[str, int]:
        """What the forward counts; every step runs alike."""
        return self._forward.counters()

    def idle(self) -> bool:
        """Nothing is ever put off. See `engine.protocol.Runner`."""
        return False

    def close(self) -> None:
        """Stop the worker and free the memory."""
        self.worker.close()
        self._latest = None
        self._forward.close()
        del self._forward, self._memory, self._rows

    def forward(self, plan: StepPlan) -> Computed:
        """On the worker: apply the deltas and run the model.

        The seconds it took are processor time of this thread, which computes as long as any does.
        What other programs take of the cores does not count.
        """
        began_s = time.thread_time()
        self._apply(plan)
        logits = self._compute(plan) if plan.rows else None
        peaks = None if logits is None else self._forward.peaks(logits)
        return Computed(logits, peaks, time.thread_time() - began_s)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.leaves:
            self._rows.leave(row)
        for join in plan.joins:
            self._rows.join(join)
        for grow in plan.grows:
            self._rows.grow(grow)
        (copies,) = plan.copies  # one pool
        self._memory.copy(copies)

    def _compute(self, plan: StepPlan) -> Logits | None:
        check(plan, self._rows.taken)
        self._rows.learn(plan)
        batch = Batch(
            self._rows.ids(plan.rows, plan.ids),
            self._rows.tables,
            plan.rows,
            plan.starts,
            plan.counts,
            plan.unwritten,
            sources_of(plan),
            whole=bool(plan.prompts or plan.pools),
            prompts=[self._rows.prompts[row] for row in plan.rows],
        )
        return self._forward.logits(batch)

    def likely(self, plan: StepPlan, peaks: Peaks) -> list[int]:
        """See `engine.protocol.Ticket`. Needs: the worker has nothing to do."""
        best, finite, _ = _by_draw(plan, peaks)
        sure = finite & self._rows.take_largest(plan.draw_into)
        found: list[int] = np.where(sure, best, _UNKNOWN).tolist()
        return found

    def draw(self, plan: StepPlan, computed: Computed, masks: Masks | None) -> StepResult:
        """On the worker: one token a draw, kept in the device rows and returned; then what prompts
        are asked, which may overwrite the logits."""
        began_s = time.thread_time()
        tokens: list[int] = []
        failed: list[tuple[int, str]] = []
        logprobs: list[Logprobs | None] = []
        probes = self._probes(plan) if self._rows.recorded else {}
        if computed.logits is not None:
            tokens, failed, logprobs = self._draw(plan, computed, masks, probes)
        prompts = [self._prompt(plan, row, count, after) for row, count, after in plan.prompts]
        vectors = [self._vector(plan, row, kind) for row, kind in plan.pools]
        sample_s = time.thread_time() - began_s
        busy_s = computed.busy_s + sample_s
        taps = [probe.tap() for probe in probes.values()]
        return StepResult(
            plan.step, tokens, failed, busy_s, logprobs, prompts, vectors, taps, sample_s
        )

    def _probes(self, plan: StepPlan) -> dict[int, Probe]:
        """One for each draw into a row that is recorded."""
        rows = self._rows
        return {
            j: Probe(j, greedy=bool(rows.columns.greedy[row]))
            for j, row in enumerate(plan.draw_into)
            if row in rows.recorded
        }

    def _draw(
        self,
        plan: StepPlan,
        computed: Computed,
        given: Masks | None,
        probes: Mapping[int, Probe],
    ) -> tuple[list[int], list[tuple[int, str]], list[Logprobs | None]]:
        logits, into = computed.logits, plan.draw_into
        assert logits is not None, "a draw without logits"
        assert computed.peaks is not None, "logits without peaks"
        best, finite, order = _by_draw(plan, computed.peaks)
        positions = [plan.starts[i] + plan.counts[i] for i in plan.draw_from]
        masks = {} if given is None else self._telling(given, into, best)
        broken = [] if finite.all() else np.flatnonzero(~finite).tolist()
        for j, probe in probes.items():
            if j not in broken:
                probe.note("logits", logits[order[j] if order is not None else j])
        if not masks and not broken and self._rows.want_largest(into):
            tokens = best.tolist()
            self._rows.drew(into, positions, tokens)
            return tokens, [], []
        if order is not None:
            logits = logits[order]
        if broken:
            logits[broken] = 0.0  # drawn like any other row, then thrown away
        asking = [j for j, row in enumerate(into) if self._rows.reports[row] >= 0]
        raw = logits[asking] if asking else None  # a copy: stages overwrite the logits
        columns, shapers = self._rows.draws(into, positions), self._rows.shapers(into)
        drawn = sample(
            logits,
            columns,
            best=best,
            shapers=shapers,
            masks=masks,
            probes=probes,
        )
        tokens = drawn.tolist()
        failed = {j: NO_TOKEN_ALLOWED for j, token in enumerate(tokens) if token == NO_TOKEN}
        failed |= dict.fromkeys(broken, "the model's logits were not finite")
        for j in failed:
            tokens[j] = _FAILED_TOKEN
        # A step ahead may compute a failed one's token.
        self._rows.drew(into, positions, [max(token, 0) for token in tokens])
        logprobs: list[Logprobs | None] = []
        if raw is not None:
            counts = [self._rows.reports[into[j]] for j in asking]
            logprobs = [None] * len(tokens)
            ids = [max(tokens[j], 0) for j in asking]
            for j, entry in zip(asking, report(raw, ids, counts), strict=True):
                logprobs[j] = None if j in failed else entry
        return tokens, sorted(failed.items()), logprobs

    def _telling(
        self, masks: Masks, into: list[int], best: npt.NDArray[np.int64]
    ) -> dict[int, Bits]:
        """Draw -> its mask, where that can change the draw: not where the draw takes the largest
        logit, and the mask allows it."""
        largest = best[masks.draws]
        words = masks.bits[np.arange(largest.size), largest >> 5].view(np.uint32)
        allowed = (words >> (largest & 31).astype(np.uint32) & 1).astype(np.bool_)
        takes = self._rows.take_largest([into[j] for j in masks.draws])
        places = np.flatnonzero(~(allowed & takes)).tolist()
        return {masks.draws[at]: masks.bits[at] for at in places}

    def _prompt(self, plan: StepPlan, row: int, count: int, after: int) -> list[Logprobs]:
        """See `StepResult.prompt_logprobs`; the logits of a few tokens at a time."""
        ids = plan.ids[row]
        assert ids is not None, "prompts are known tokens"
        targets = ids[1:] + ([after] if after >= 0 else [])
        first, most = sum(plan.counts[:row]), self._forward.most_again
        out: list[Logprobs] = []
        for at in range(0, len(targets), most):
            some = targets[at : at + most]
            logits = self._forward.again(range(first + at, first + at + len(some)))
            out += report(logits, some, [count] * len(some))
        return out

    def _vector(self, plan: StepPlan, row: int, kind: Pool) -> bytes:
        """See `StepResult.vectors`."""
        first, count = sum(plan.counts[:row]), plan.counts[row]
        if kind == "sum":
            vector = self._forward.states(first, count).sum(0)
        else:
            vector = self._forward.states(first + count - 1, 1)[0]
            if kind == "scores":
                vector = self._forward.scores(vector)
        return bytes(vector.astype("<f4", copy=False).data)


def _by_draw(
    plan: StepPlan, peaks: Peaks
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], list[int] | None]:
    """`best` and `finite` [draws], and the row of logits of each draw; None: one each, in order."""
    sources = {row: i for i, row in enumerate(sources_of(plan))}
    if len(sources) == len(plan.draw_from):
        return peaks.best, peaks.finite, None
    order = [sources[row] for row in plan.draw_from]
    return peaks.best[order], peaks.finite[order], order

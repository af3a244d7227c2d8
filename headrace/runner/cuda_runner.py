"""Computes steps on a GPU: plan -> deltas, forward graph, sampler, all queued without a wait.

A step of few tokens replays a CUDA graph (see `runner.forward`); a steady decode step is that graph
and the sampler's two kernels, six where a row truncates. Only a step of very many tokens launches
its operations one by one. Tokens come back through pinned memory, one event a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import get_args

import torch

from headrace.engine.protocol import Capacity, Masks
from headrace.errors import EngineError
from headrace.messages import Output, StepPlan, StepResult
from headrace.runner.forward import Forward, Way
from headrace.runner.plan_check import check, sources_of

_OFFERED = (Output.NONE, Output.SAMPLE)
_IN_FLIGHT = 4  # result slots: more than the tickets that may be open


class CudaTicket:
    """A step in flight; see `engine.protocol.Ticket`."""

    def __init__(self, runner: CudaRunner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan
        self._slot = -1
        self.finished = False

    def finish(self, masks: Masks | None = None) -> None:
        """Enqueue the sampler."""
        assert not self.finished, "a ticket is finished once"
        assert masks is None, "this runner takes no masks"
        self.finished = True
        self._slot = self._runner.draw(self._plan)

    def result(self) -> StepResult:
        """Wait for the step. Raises what broke it."""
        assert self.finished, "finish() comes before result()"
        return self._runner.read(self._plan, self._slot)


class CudaRunner:
    """A decoder-only model over one KV group; see `engine.protocol.Runner`.

    Every call queues work on one stream of the device; only `Ticket.result` waits.
    """

    def __init__(self, forward: Forward, capacity: Capacity) -> None:
        self._forward, self._capacity = forward, capacity
        self._device = forward.device
        self._state = forward.state
        self._latest: CudaTicket | None = None
        cuda = self._device.type == "cuda"
        self._tokens = torch.zeros(capacity.max_rows, dtype=torch.int32, device=self._device)
        self._results = torch.zeros(
            (_IN_FLIGHT, capacity.max_rows), dtype=torch.int32, pin_memory=cuda
        )
        self._began = [self._event() for _ in range(_IN_FLIGHT)]
        self._ended = [self._event() for _ in range(_IN_FLIGHT)]
        self._at = 0
        self._counts = {f"steps_{way}": 0 for way in get_args(Way)}
        forward.settle()

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event(enable_timing=True) if self._device.type == "cuda" else None

    @property
    def capacity(self) -> Capacity:
        """What this runner offers."""
        return self._capacity

    def counters(self) -> Mapping[str, int]:
        """Steps by the way they ran (see `runner.forward`); kernels compiled since the start."""
        return self._counts | {"jit_compiles": self._forward.compiles}

    def launch(self, plan: StepPlan) -> CudaTicket:
        """Queue a step. Needs: `finish` was called on the ticket before.

        Raises EngineError for a kind of output that this runner does not offer.
        """
        assert self._latest is None or self._latest.finished, (
            f"step {plan.step} is launched before the one before it was finished"
        )
        for kind in plan.outputs:
            if kind not in _OFFERED:
                raise EngineError(f"this runner does not offer output kind {kind}")
        self._at = (self._at + 1) % _IN_FLIGHT
        with self._queueing():
            began = self._began[self._at]
            if began is not None:
                began.record()
            self._state.apply(plan)
            for group, pairs in enumerate(plan.copies):
                assert group == 0, "this runner has one KV group"
                self._forward.store.copy(pairs)
            if plan.rows:
                check(plan, self._state.taken)
                way = self._forward.run(plan, sources_of(plan))
                self._counts[f"steps_{way}"] += 1
        self._latest = CudaTicket(self, plan)
        return self._latest

    def draw(self, plan: StepPlan) -> int:
        """Queue the draws of the step launched last; the slot that `read` wants."""
        slot, draws = self._at, len(plan.draw_from)
        with self._queueing():
            if draws:
                self._forward.sample(plan, self._tokens[:draws])
                self._results[slot, :draws].copy_(self._tokens[:draws], non_blocking=True)
            ended = self._ended[slot]
            if ended is not None:
                ended.record()
        return slot

    def read(self, plan: StepPlan, slot: int) -> StepResult:
        """Wait for the step in `slot`."""
        began, ended = self._began[slot], self._ended[slot]
        busy_s = 0.0
        if began is not None and ended is not None:
            ended.synchronize()
            busy_s = began.elapsed_time(ended) / 1e3
        tokens = self._results[slot, : len(plan.draw_from)].tolist()
        why = "the model's logits were not finite"
        failed = [(j, why) for j, token in enumerate(tokens) if token < 0]
        return StepResult(plan.step, tokens, failed, busy_s)

    @contextlib.contextmanager
    def _queueing(self) -> Iterator[None]:
        with torch.inference_mode(), self._forward.on_stream():
            yield

    def close(self) -> None:
        """Wait for the device and free its memory."""
        self._forward.close()
        self._latest = None
        del self._forward, self._state, self._tokens

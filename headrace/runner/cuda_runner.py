"""Computes steps on a GPU: plan -> deltas, forward graph, sampler, all queued without a wait.

A step of few tokens replays a CUDA graph (see `runner.forward`); a steady decode step is that graph
and the sampler's two kernels, six where a row truncates; what more a row asks for adds launches to
the steps that it is in (`runner.draws`). Only a step of very many tokens launches its operations
one by one. Tokens come back through pinned memory, one event a step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.protocol import Capacity, Masks
from headrace.kernels.logprobs import ENTRY
from headrace.messages import NO_TOKEN_ALLOWED, Logprobs, Pool, StepPlan, StepResult
from headrace.runner.device_state import LIST_IDS
from headrace.runner.draws import Queued
from headrace.runner.entries import unpack
from headrace.runner.forward import Forward
from headrace.runner.graphs import Way
from headrace.runner.plan_check import check, refuse_unoffered
from headrace.runner.prompt_logprobs import PromptLogprobs
from headrace.runner.taps import Taps

_NOTHING_LEFT = -2  # `kernels.draw`: no logit is finite
_IN_FLIGHT = 4  # result slots: more than the tickets that may be open


class Finished(NamedTuple):
    """What `CudaRunner.read` needs of a step whose draws are queued."""

    slot: int
    draws: Queued | None  # None: the step draws nothing
    prompts: list[int]  # entries of each of the plan's prompts


class CudaTicket:
    """A step in flight; see `engine.protocol.Ticket`."""

    def __init__(self, runner: CudaRunner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan
        self._finished: Finished | None = None

    @property
    def finished(self) -> bool:
        """Whether `finish` was called."""
        return self._finished is not None

    def likely(self) -> Sequence[int]:
        """Nobody knows before the device is done."""
        return ()

    def finish(self, masks: Masks | None = None) -> None:
        """Enqueue the sampler. The masks are copied."""
        assert self._finished is None, "a ticket is finished once"
        self._finished = self._runner.draw(self._plan, masks)

    def result(self) -> StepResult:
        """Wait for the step. Raises what broke it."""
        assert self._finished is not None, "finish() comes before result()"
        return self._runner.read(self._plan, self._finished)


class CudaRunner:
    """A decoder-only model; see `engine.protocol.Runner`.

    Every call queues work on one stream of the device; only `Ticket.result` waits.
    """

    def __init__(self, forward: Forward, capacity: Capacity) -> None:
        self._forward, self._capacity = forward, capacity
        self._device = forward.device
        self._state = forward.state
        self._latest: CudaTicket | None = None
        cuda = self._device.type == "cuda"
        self._tokens = torch.zeros(capacity.max_rows, dtype=torch.int32, device=self._device)
        most_tokens = forward.place.buffers.x.shape[0]
        self._prompts = PromptLogprobs(forward, most_tokens)
        self._results, self._entries, self._prompt_entries = (
            torch.zeros((_IN_FLIGHT, *shape), dtype=torch.int32, pin_memory=cuda)
            for shape in ((capacity.max_rows,), (capacity.max_rows, ENTRY), (most_tokens, ENTRY))
        )
        pooler = forward.pooler
        self._vectors, self._scores = (
            torch.zeros((_IN_FLIGHT, *tensor.shape), dtype=torch.float32, pin_memory=cuda)
            for tensor in (pooler.vectors, pooler.scores)
        )
        self._began = [self._event() for _ in range(_IN_FLIGHT)]
        self._computed = [self._event() for _ in range(_IN_FLIGHT)]  # the forward pass, that is
        self._ended = [self._event() for _ in range(_IN_FLIGHT)]
        self._taps = Taps(_IN_FLIGHT, capacity.vocab_size, self._device)
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
        """Steps by the way they ran (see `runner.forward`); kernels compiled since the start; how
        many graphs there are, and how many there will be (see `runner.graphs`); what the experts of
        a mixture got.
        """
        graphs, mixture = self._forward.graphs, self._forward.place.buffers.mixture
        return {
            **self._counts,
            **({} if mixture is None else mixture.counters()),
            "jit_compiles": self._forward.compiles,
            "graphs_captured": graphs.captured,
            "graphs_planned": graphs.planned,
        }

    def idle(self) -> bool:
        """Capture one graph that was put off."""
        assert self._latest is None or self._latest.finished, "a step waits for its draws"
        return self._forward.capture_next()

    def launch(self, plan: StepPlan) -> CudaTicket:
        """Queue a step. Needs: `finish` was called on the ticket before.

        Raises EngineError for a kind of output that this runner does not offer.
        """
        assert self._latest is None or self._latest.finished, (
            f"step {plan.step} is launched before the one before it was finished"
        )
        refuse_unoffered(plan)
        self._at = (self._at + 1) % _IN_FLIGHT
        with self._queueing():
            began = self._began[self._at]
            if began is not None:
                began.record()
            self._state.apply(plan)
            (copies,) = plan.copies  # one pool
            self._forward.store.copy(copies)
            if plan.rows:
                check(plan, self._state.taken)
                way = self._forward.run(plan)
                self._counts[f"steps_{way}"] += 1
        self._latest = CudaTicket(self, plan)
        return self._latest

    def draw(self, plan: StepPlan, masks: Masks | None) -> Finished:
        """Queue the draws of the step launched last; `read` wants what it returns."""
        slot, draws = self._at, len(plan.draw_from)
        queued, prompts = None, list[int]()
        with self._queueing():
            computed = self._computed[slot]
            if computed is not None:
                computed.record()
            if draws:
                self._taps.begin(slot, plan.draw_into, self._state.recorded)
                taps = self._taps if self._taps.draws else None
                queued = self._forward.sample(plan, self._tokens[:draws], masks, taps)
                _fetch(self._tokens, self._results[slot], draws)
                _fetch(self._forward.sampler.entries, self._entries[slot], len(queued.asked))
            if plan.pools:
                self._forward.pool(plan)
                _fetch(self._forward.pooler.vectors, self._vectors[slot], len(plan.pools))
                _fetch(self._forward.pooler.scores, self._scores[slot], len(plan.pools))
            if plan.prompts:
                prompts = self._prompts.queue(plan)
                _fetch(self._prompts.entries, self._prompt_entries[slot], sum(prompts))
            ended = self._ended[slot]
            if ended is not None:
                ended.record()
        return Finished(slot, queued, prompts)

    def read(self, plan: StepPlan, finished: Finished) -> StepResult:
        """Wait for a step."""
        slot = finished.slot
        began, computed, ended = self._began[slot], self._computed[slot], self._ended[slot]
        busy_s = sample_s = waited_s = 0.0
        if began is not None and computed is not None and ended is not None:
            asked_s = time.monotonic()
            ended.synchronize()
            waited_s = time.monotonic() - asked_s
            busy_s = began.elapsed_time(ended) / 1e3
            sample_s = computed.elapsed_time(ended) / 1e3
        tokens: list[int] = []
        failed: list[tuple[int, str]] = []
        logprobs: list[Logprobs | None] = []
        if finished.draws is not None:
            tokens, failed = _tokens_of(finished.draws, self._results[slot].numpy())
            logprobs = _logprobs_of(finished.draws, self._entries[slot].numpy())
        said, at = list[list[Logprobs]](), 0
        for (_, most, _), count in zip(plan.prompts, finished.prompts, strict=True):
            part = self._prompt_entries[slot].numpy()[at : at + count]
            said.append(unpack(part, [most] * count))
            at += count
        vectors = [self._vector(slot, i, kind) for i, (_, kind) in enumerate(plan.pools)]
        taps = self._taps.read(slot) if finished.draws is not None else []
        return StepResult(
            plan.step, tokens, failed, busy_s, logprobs, said, vectors, taps, sample_s, waited_s
        )

    def _vector(self, slot: int, i: int, kind: Pool) -> bytes:
        found = self._scores if kind == "scores" else self._vectors
        return found[slot, i].numpy().astype("<f4", copy=False).tobytes()

    @contextlib.contextmanager
    def _queueing(self) -> Iterator[None]:
        with torch.inference_mode(), self._forward.on_stream():
            yield

    def close(self) -> None:
        """Wait for the device and free its memory."""
        self._forward.close()
        self._latest = None
        del self._forward, self._state, self._tokens, self._prompts


def _fetch(source: torch.Tensor, target: torch.Tensor, count: int) -> None:
    if count:
        target[:count].copy_(source[:count], non_blocking=True)


def _tokens_of(
    queued: Queued, drawn: npt.NDArray[np.int32]
) -> tuple[list[int], list[tuple[int, str]]]:
    """Tokens by draw, and why some failed."""
    tokens = [0] * len(queued.order)
    for j, token in zip(queued.order, drawn.tolist(), strict=False):
        tokens[j] = token
    failed = []
    refused = set(queued.refused)
    for j, token in enumerate(tokens):
        if token < 0 or j in refused:
            failed.append((j, _why(token, refused=j in refused, edited=j in queued.edited)))
            tokens[j] = -1
    return tokens, failed


def _why(token: int, *, refused: bool, edited: bool) -> str:
    if refused:
        return f"the lists of ids of all running requests exceed {LIST_IDS} ids"
    if token == _NOTHING_LEFT and edited:
        return NO_TOKEN_ALLOWED
    return "the model's logits were not finite"


def _logprobs_of(queued: Queued, entries: npt.NDArray[np.int32]) -> list[Logprobs | None]:
    """A column beside the tokens, [] where no draw asks."""
    if not queued.asked:
        return []
    column: list[Logprobs | None] = [None] * len(queued.order)
    said = unpack(entries[: len(queued.asked)], [most for _, most in queued.asked])
    for (j, _), one in zip(queued.asked, said, strict=True):
        column[j] = one
    return column

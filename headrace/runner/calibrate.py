"""Measures a model of step time on the card it runs on; see `engine.protocol.StepCost`.

Five short runs of the real forward pass. The KV cache holds whatever the runs before left: the time
of a product does not hang on its numbers as much as on its shape.
"""

from __future__ import annotations

import itertools
import random

import torch

from headrace.engine.protocol import StepCost
from headrace.messages import Join, Output, Sampling, StepPlan
from headrace.runner.forward import Forward

_TILE = 128  # rows of a matrix product's tile on current cards
_REPEATS = 3
_SHARE_OF_COPY = 0.8  # of the bandwidth the weights are read with, for KV of decode rows


def measure_cost(forward: Forward, max_tokens: int) -> StepCost:
    """Times steps of 1, 1/4 and all of `max_tokens`, and one that ends a long context."""
    probe = _Probe(forward)
    longest = min(max_tokens, probe.room)
    small = max(1, longest // 8)
    floor_s = probe.seconds(0, 1)
    small_s = probe.seconds(0, small)
    large_s = probe.seconds(0, longest)
    late_s = probe.seconds(longest - small, small)
    pair_s = max(0.0, (late_s - small_s) / (small * max(1, longest - small)))
    # large_s - small_s = token_s * (difference of tokens) + pair_s * (difference of pairs)
    pairs = (longest**2 - small**2) / 2
    token_s = max(1e-9, (large_s - small_s - pair_s * pairs) / max(1, longest - small))
    base_s = max(0.0, small_s - token_s * small - pair_s * small**2 / 2)
    weights = sum(p.numel() * p.element_size() for p in forward.model.parameters())
    per_token = forward.store.token_bytes
    read_s = floor_s * per_token / weights / _SHARE_OF_COPY
    return StepCost(floor_s, token_s, min(base_s, floor_s), pair_s, read_s, _TILE)


class _Probe:
    """Runs single-row steps of chosen shapes."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        store, width = forward.store, forward.state.tables.shape[1]
        self.room = min(store.blocks, width - 2) * store.block_size
        blocks = list(range(self.room // store.block_size))
        join = Join(0, Sampling(temperature=0.0), 0, [blocks])
        self._step = itertools.count(1)
        self._plan([], [join], 0, 0)

    def _plan(self, leaves: list[int], joins: list[Join], start: int, count: int) -> None:
        draw = random.Random(0)
        vocab = self._forward.model.spec.vocab_size
        ids: list[list[int] | None] = [[draw.randrange(vocab) for _ in range(count)]]
        rows = [0] if count else []
        plan = StepPlan(
            next(self._step),
            leaves,
            joins,
            [],
            [[]],
            rows,
            [start] * len(rows),
            [count] * len(rows),
            ids[: len(rows)],
            [Output.SAMPLE] * len(rows),
            [],
            [0] * len(rows),
            [0] * len(rows),
        )
        with torch.inference_mode(), self._forward.on_stream():
            self._forward.state.apply(plan)
            if rows:
                self._forward.run(plan, [0])

    def seconds(self, start: int, count: int) -> float:
        """The shortest of a few runs, after one that is not counted."""
        best = float("inf")
        for attempt in range(_REPEATS + 1):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with self._forward.on_stream():
                began.record()
                self._plan([], [], start, count)
                ended.record()
            ended.synchronize()
            if attempt:
                best = min(best, began.elapsed_time(ended) / 1e3)
        return best

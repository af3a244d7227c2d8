"""Measures a model of step time on the card it runs on; see `engine.protocol.StepCost`.

Runs of the real forward pass with random tokens of one sequence, by the graphs that serve. What
the KV cache then holds is written anew by whoever gets the blocks.
"""

from __future__ import annotations

import itertools
import random

import torch

from headrace.engine.protocol import StepCost
from headrace.messages import Join, Output, Sampling, StepPlan
from headrace.runner.forward import MIXED_SIZES, Forward

_TILE = 128  # rows of a matrix product's tile on current cards
_REPEATS = 2
_SHARE_OF_READ = 0.85  # of the rate the weights are read with, for KV of decode rows


def measure_cost(forward: Forward, max_tokens: int) -> StepCost:
    """From steps of one token, of half and all of the largest mixed graph, and of one that ends
    a long context."""
    probe = Probe(forward)
    large = min(max_tokens, MIXED_SIZES[-1], probe.room)
    small = max(1, large // 2)
    far = max(0, min(8 * large, probe.room) - large)
    floor_s = probe.seconds(0, 1)
    small_s, large_s = probe.seconds(0, small), probe.seconds(0, large)
    pair_s = max(0.0, (probe.seconds(far, large) - large_s) / (large * max(1, far)))
    pairs = (large**2 - small**2) / 2
    token_s = max(1e-9, (large_s - small_s - pair_s * pairs) / max(1, large - small))
    base_s = large_s - token_s * large - pair_s * large**2 / 2
    probe.close()
    weights = sum(p.numel() * p.element_size() for p in forward.model.parameters())
    read_s = floor_s * forward.store.token_bytes / weights / _SHARE_OF_READ
    return StepCost(floor_s, token_s, min(max(0.0, base_s), floor_s), pair_s, read_s, _TILE)


class Probe:
    """Runs steps of chosen shapes for one sequence, which takes row 0 and blocks from 0 on."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        store, width = forward.store, forward.state.tables.shape[1]
        self.room = min(store.blocks, width - 2) * store.block_size
        blocks = list(range(self.room // store.block_size))
        self._numbers = itertools.count(1)
        self._draw = random.Random(0)
        self._run([], [Join(0, Sampling(temperature=0.0), 0, [blocks])], 0, 0)

    def _run(self, leaves: list[int], joins: list[Join], start: int, count: int) -> None:
        some = range(1 if count else 0)
        vocab = self._forward.model.spec.vocab_size
        plan = StepPlan(
            next(self._numbers),
            leaves,
            joins,
            [],
            [[]],
            rows=[0 for _ in some],
            starts=[start for _ in some],
            counts=[count for _ in some],
            ids=[[self._draw.randrange(vocab) for _ in range(count)] for _ in some],
            outputs=[Output.SAMPLE for _ in some],
            unwritten=[],
            draw_from=[0 for _ in some],
            draw_into=[0 for _ in some],
        )
        with torch.inference_mode(), self._forward.on_stream():
            self._forward.state.apply(plan)
            if count:
                self._forward.run(plan, [0])

    def seconds(self, start: int, count: int) -> float:
        """The shortest of a few runs, after one that is not counted."""
        best = float("inf")
        for attempt in range(_REPEATS + 1):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with self._forward.on_stream():
                began.record()
                self._run([], [], start, count)
                ended.record()
            ended.synchronize()
            if attempt:
                best = min(best, began.elapsed_time(ended) / 1e3)
        return best

    def close(self) -> None:
        """The sequence leaves."""
        self._run([0], [], 0, 0)

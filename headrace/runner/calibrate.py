"""Measures a model of step time on the card it runs on; see `engine.protocol.StepCost`.

Runs of the real forward pass with random tokens of one sequence, by the graphs that serve. What
the KV cache then holds is written anew by whoever gets the blocks.
"""

from __future__ import annotations

import itertools
import random

import msgspec
import numpy as np
import torch

from headrace.engine.protocol import StepCost
from headrace.messages import Join, Output, Sampling, StepPlan
from headrace.runner.forward import MIXED_SIZES, Forward
from headrace.runner.graphs import Way

_TILE = 128  # rows of a matrix product's tile on current cards
# Sizes whose attention to a long context is not timed: the programs of all of these fill a card but
# once, so between the sizes around them it takes a time in between.
_BETWEEN = (64, 128, 256)
_SHARE_OF_READ = 0.85  # of the rate the weights are read with, for KV of decode rows


def measure_cost(forward: Forward, max_tokens: int, *, limited: bool) -> StepCost:
    """Times every size of a mixed graph without context, and at the end of a long one those that
    tell the others. Where steps are not `limited` by what they take, nobody asks for the price of
    each size: two of them tell the rest."""
    probe = Probe(forward)
    most = min(max_tokens, MIXED_SIZES[-1], probe.room)
    sizes = sorted({most, *(size for size in MIXED_SIZES if size < most)})
    middle = sizes[len(sizes) // 2]
    if not limited:
        sizes = sorted({middle, most})
    far = max(0, min(8 * most, probe.room) - most)
    floor_s = probe.seconds(0, 1)
    near_s = [probe.seconds(0, size) for size in sizes]
    size_pair_s = _pair_seconds(probe, sizes, near_s, far) if far else [0.0] * len(sizes)
    probe.close()
    size_s: list[float] = []
    for size, seconds, pair_s in zip(sizes, near_s, size_pair_s, strict=True):
        alone_s = max(floor_s, seconds - pair_s * size**2 / 2)
        size_s.append(max([alone_s, *size_s[-1:]]))  # noise never makes a larger step cheaper
    parameters = forward.model.parameters()
    weights = sum(p.numel() * p.element_size() for p in parameters if p.is_cuda)
    read_s = floor_s * forward.store.token_bytes / weights / _SHARE_OF_READ
    token_s = (size_s[-1] - size_s[sizes.index(middle)]) / max(1, most - middle)
    token_s = max(token_s, size_s[-1] / most / 2)
    base_s = max(0.0, size_s[-1] - token_s * most)
    cost = StepCost(floor_s, token_s, base_s, size_pair_s[-1], read_s, _TILE)
    if not limited:
        return cost
    return msgspec.structs.replace(
        cost,
        sizes=(1, *sizes),
        size_s=(floor_s, *size_s),
        size_pair_s=(size_pair_s[0], *size_pair_s),
    )


def _pair_seconds(probe: Probe, sizes: list[int], near_s: list[float], far: int) -> list[float]:
    """Of each size, a pair of a prompt's token and one that it sees; `far`: of these, beyond the
    step's own."""
    ends = sizes[0], sizes[-1]
    timed = [i for i, size in enumerate(sizes) if size not in _BETWEEN or size in ends]
    more_s = [max(0.0, probe.seconds(far, sizes[i]) - near_s[i]) for i in timed]
    every_s = np.interp(sizes, [sizes[i] for i in timed], more_s)
    return [float(more) / (size * far) for more, size in zip(every_s, sizes, strict=True)]


class Probe:
    """Runs steps of chosen shapes for one sequence, which takes row 0 and blocks from 0 on: of each
    KV group its own, for every token, so that layers find in caches what they would in a server."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        store, (groups, _, width) = forward.store, forward.state.tables.shape
        blocks = min(store.blocks // groups, width - 2)
        self.room = blocks * store.block_size
        tables = [list(range(group * blocks, (group + 1) * blocks)) for group in range(groups)]
        self._numbers = itertools.count(1)
        self._ran = set[tuple[Way, int]]()
        self._draw = random.Random(0)
        self._run(self._plan([], [Join(0, Sampling(temperature=0.0), 0, tables)], 0, 0))

    def _plan(self, leaves: list[int], joins: list[Join], start: int, count: int) -> StepPlan:
        some = range(1 if count else 0)
        vocab = self._forward.model.spec.vocab_size
        return StepPlan(
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

    def _run(self, plan: StepPlan) -> None:
        with torch.inference_mode(), self._forward.on_stream():
            self._forward.state.apply(plan)
            if plan.rows:
                self._forward.run(plan)

    def run(self, start: int, count: int) -> float:
        """Seconds of one step of `count` tokens from position `start` on; waits for it."""
        plan = self._plan([], [], start, count)
        self._ran.add((self._forward.way(plan), count))
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._forward.on_stream():
            began.record()
            self._run(plan)
            ended.record()
        ended.synchronize()
        taken_s: float = began.elapsed_time(ended) / 1e3
        return taken_s

    def seconds(self, start: int, count: int) -> float:
        """As `run`, but the first run of a graph, which brings it to the device, is not counted."""
        if (self._forward.way(self._plan([], [], start, count)), count) not in self._ran:
            self.run(start, count)
        return self.run(start, count)

    def close(self) -> None:
        """The sequence leaves."""
        self._run(self._plan([0], [], 0, 0))

"""The real decode step of a model, captured as the server does, with choices that can be swapped.

Every row is a sequence of its own whose blocks lie anywhere in the cache. Weights and cache are
random. The sampler, which follows the graph, is not timed.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.kernels.descent import Choices, Unfit
from headrace.backends.cuda.attention import Attention
from headrace.backends.cuda.buffers import Buffers
from headrace.backends.cuda.device import Card
from headrace.backends.cuda.ops import CudaOps
from headrace.kernels.columns import StepColumns
from headrace.kernels.launch import compiling
from headrace.kernels.product import Config
from headrace.kernels.tuned import Decoding
from headrace.messages import Join, Output, Sampling, StepPlan
from headrace.models.layers import Decoder
from headrace.runner.build_cuda import Plan, forward_on
from headrace.runner.device_state import StepInput

BLOCK_SIZE = 16
REPLAYS = 128  # the most that one timing takes: positions move on with each
_ALIGNED = 16  # entries of a column: the server's columns are wide, so their addresses are aligned


def weight_bytes(model: Decoder) -> int:
    """Of what a step reads: everything but the embedding, unless it is the output layer too."""
    layers = sum(p.numel() * p.element_size() for p in model.blocks.parameters())
    head = model.embed.weight if model.head is None else model.head.weight
    return layers + model.spec.vocab_size * model.spec.hidden * head.element_size()


class Scene:
    """Steps of `tokens` decode rows with at most `longest` tokens before them.

    `choices`: kind of a matrix -> Config | None, and "decode" -> Decoding.
    """

    def __init__(
        self, model: Decoder, card: Card, tokens: int, longest: int, choices: Choices
    ) -> None:
        self.tokens, self.choices = tokens, choices
        self._model, spec = model, model.spec
        parameter = next(model.parameters())
        self._device = parameter.device
        draws = max(tokens, _ALIGNED)
        self._buffers = Buffers(spec, tokens, draws, parameter.dtype, self._device)
        blocks_a_row = -(-(longest + REPLAYS) // BLOCK_SIZE) + 1
        plan = Plan(
            max_rows=tokens,
            max_tokens=tokens,
            block_size=BLOCK_SIZE,
            max_model_len=longest + REPLAYS,
        )
        self.forward = forward_on(
            model,
            plan,
            tokens * blocks_a_row,
            card,
            self._buffers,
            choose=self._choose,
            decoding=self._decoding,
        )
        self._attention = Attention(
            spec,
            card.multiprocessors,
            tokens,
            tokens,
            parameter.dtype,
            self._device,
            self._decoding,
        )
        self._step = 0
        with torch.inference_mode(), self.forward.on_stream():
            self._fill(blocks_a_row)

    def _choose(self, kind: str, m: int, n: int, k: int) -> Config | None:
        chosen: Config | None = self.choices[kind]
        return chosen

    def _decoding(self, tokens: int) -> Decoding:
        chosen: Decoding = self.choices["decode"]
        return chosen

    def _fill(self, blocks_a_row: int) -> None:
        store, spare = self.forward.store, self.forward.store.spare_block
        for cache in (*store.k, *store.v):
            cache[:spare].normal_()
        blocks = list(range(spare))
        random.Random(0).shuffle(blocks)
        joins = [
            Join(row, Sampling(temperature=0.0), 0, [blocks[row * blocks_a_row :][:blocks_a_row]])
            for row in range(self.tokens)
        ]
        self.forward.state.apply(self._plan(0, joins))
        self.forward.state.last.random_(0, self._model.spec.vocab_size)

    def _plan(self, context: int, joins: Sequence[Join] = ()) -> StepPlan:
        self._step += 1
        rows = [] if joins else list(range(self.tokens))
        return StepPlan(
            step=self._step,
            leaves=[],
            joins=list(joins),
            grows=[],
            copies=[[]],
            rows=rows,
            starts=[context] * len(rows),
            counts=[1] * len(rows),
            ids=[None] * len(rows),
            outputs=[Output.SAMPLE] * len(rows),
            unwritten=[],
            draw_from=rows,
            draw_into=rows,
        )

    def run(self, context: int) -> None:
        """Queue one step of rows that have `context` tokens behind them."""
        self.forward.run(self._plan(context), list(range(self.tokens)))

    def logits(self, context: int, choices: Choices) -> Tensor:
        """[tokens, vocab] of a step with these choices, float64."""
        self.capture(choices)
        with torch.inference_mode(), self.forward.on_stream():
            self.run(context)
            return self._buffers.logits[: self.tokens].double()

    def capture(self, choices: Choices) -> None:
        """Make the graph anew. Raises Unfit where a kernel does not fit the card."""
        self.choices = choices
        try:
            self.forward.capture(limit=1)
        except triton.runtime.errors.OutOfResources as error:
            raise Unfit(str(error)) from error

    def times_ms(self, contexts: Sequence[int], replays: int) -> list[float]:
        """Median of `replays` steps in a row, for each context."""
        assert replays < REPLAYS, f"room for {REPLAYS} steps"
        return [statistics.median(self._replay(context, replays)) for context in contexts]

    def _replay(self, context: int, replays: int) -> list[float]:
        """Milliseconds from step to step; the host runs ahead, so launches are not waited for."""
        with torch.inference_mode(), self.forward.on_stream():
            self.run(context)  # sends the columns
            marks = []
            for i in range(1, replays + 2):
                marks.append(_mark(self._device))
                if i <= replays:
                    self.run(context + i)
        return _between_ms(marks)

    def compile(self, wanted: Sequence[Choices], workers: int) -> None:
        """Compile what steps with these choices launch, side by side. One layer stands for all."""
        source = StepInput(self.tokens, max(self.tokens, _ALIGNED), self._device)
        ids = source.ids
        columns = StepColumns(
            source.rows, source.positions, source.writes, self.forward.state.tables
        )
        ops = CudaOps(self.forward.place, columns, ids, self._attention.singles(columns))
        with torch.inference_mode(), self.forward.on_stream(), compiling(workers):
            for choices in wanted:
                self.choices = choices
                x = self._model.blocks[0](ops.embed(self._model.embed), ops)
                self._model.logits(x, ops)


def _mark(device: torch.device) -> Any:
    """A point in time on the device's current stream; where there is no GPU, on the host."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between_ms(marks: list[Any]) -> list[float]:
    pairs = list(itertools.pairwise(marks))
    if isinstance(marks[0], float):
        return [(after - before) * 1e3 for before, after in pairs]
    marks[-1].synchronize()
    return [before.elapsed_time(after) for before, after in pairs]


class SceneTimer:
    """A `descent.Timer` over scenes. `contexts`: (tokens, name) -> where that choice is judged."""

    def __init__(self, scenes: Sequence[Scene], contexts: Callable[[int, str], list[int]]) -> None:
        self.scenes, self.contexts = scenes, contexts

    def __call__(self, choices: Choices, name: str, replays: int) -> float:
        return sum(sum(times) for times in self.each(choices, name, replays).values())

    def each(self, choices: Choices, name: str, replays: int) -> dict[int, list[float]]:
        """tokens -> milliseconds at each context."""
        found = {}
        for scene in self.scenes:
            scene.capture(choices)
            found[scene.tokens] = scene.times_ms(self.contexts(scene.tokens, name), replays)
        return found

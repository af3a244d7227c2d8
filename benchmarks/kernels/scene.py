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
import triton.errors
from torch import Tensor

from benchmarks.kernels.descent import Choices, Unfit
from headrace.backends.cuda.attention import Attention
from headrace.backends.cuda.buffers import Buffers
from headrace.backends.cuda.device import Card
from headrace.backends.cuda.latent import LatentPaths
from headrace.backends.cuda.ops import CudaOps
from headrace.kernels.launch import compiling
from headrace.kernels.product import Config
from headrace.kernels.tuned import Decoding
from headrace.messages import Join, Output, Sampling, StepPlan
from headrace.models.kv_layout import layout_of
from headrace.models.layers import Decoder
from headrace.runner.build_cuda import Plan, forward_on
from headrace.runner.step_input import StepInput

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
        self._model, spec, dtype = model, model.spec, model.dtype
        self._device = next(model.parameters()).device
        draws = max(tokens, _ALIGNED)
        self._buffers = Buffers(spec, tokens, draws, dtype, self._device)
        length = longest + REPLAYS
        blocks_a_row = -(-length // BLOCK_SIZE) + 1
        plan = Plan(tokens, tokens, BLOCK_SIZE, length)
        blocks = tokens * blocks_a_row * len(layout_of(spec).windows)
        self._forward = forward_on(
            model,
            plan,
            blocks,
            card,
            self._buffers,
            choose=self._choose,
            decoding=self._decoding,
        )
        sizes = (card.multiprocessors, tokens, tokens, dtype, self._device)
        self._attention = (
            Attention(spec, *sizes, self._decoding)
            if spec.latent is None
            else LatentPaths(spec, *sizes)
        )
        self._input = StepInput(tokens, draws, self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        with torch.inference_mode(), self._forward.on_stream():
            self._fill(blocks_a_row)

    def _choose(self, kind: str, m: int, n: int, k: int) -> Config | None:
        chosen: Config | None = self.choices[kind]
        return chosen

    def _decoding(self, tokens: int) -> Decoding:
        chosen: Decoding = self.choices["decode"]
        return chosen

    def _fill(self, blocks_a_row: int) -> None:
        """Random keys, values and tokens; each row's blocks anywhere in the cache."""
        state, store = self._forward.state, self._forward.store
        for cache in (*store.k, *store.v):
            cache[: store.spare_block].normal_()
        blocks = list(range(store.spare_block))
        random.Random(0).shuffle(blocks)
        own = (blocks[first:][:blocks_a_row] for first in range(0, len(blocks), blocks_a_row))
        joins = [
            Join(row, Sampling(temperature=0.0), 0, [next(own) for _ in state.tables])
            for row in range(self.tokens)
        ]
        state.apply(StepPlan(0, [], joins, [], [[]], [], [], [], [], [], [], [], []))
        state.last.random_(0, self._model.spec.vocab_size)

    def _load(self, context: int) -> None:
        """Send the columns of a step whose rows have `context` tokens behind them."""
        rows, count = list(range(self.tokens)), self.tokens
        kinds: list[int] = [Output.SAMPLE] * count
        starts = [context] * count
        ids: list[list[int] | None] = [None] * count
        plan = StepPlan(1, [], [], [], [[]], rows, starts, [1] * count, ids, kinds, [], rows, rows)
        self._input.load(plan, rows, self.tokens, self._forward.state.spare_row)

    def _ops(self) -> CudaOps:
        columns = self._input.columns(self.tokens, self._forward.state.tables)
        attention = self._attention.singles(columns)
        return CudaOps(self._forward.place, columns, self._input.ids, attention)

    def _launch(self) -> None:
        """What `Forward` launches for a step of single tokens."""
        ops = self._ops()
        x = self._model(ops)
        chosen = self._buffers.chosen[: self.tokens]
        torch.index_select(x, 0, self._input.sources[: self.tokens], out=chosen)
        self._model.logits(chosen, ops)

    def step(self) -> None:
        """Queue the next step: positions have moved on with the one before."""
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()

    def logits(self, context: int, choices: Choices) -> Tensor:
        """[tokens, vocab] of a step with these choices, float64."""
        self.capture(choices)
        with torch.inference_mode(), self._forward.on_stream():
            self._load(context)
            self._buffers.logits.fill_(float("nan"))
            self.step()
            return self._buffers.logits[: self.tokens].double().cpu()

    def capture(self, choices: Choices) -> None:
        """Make the graph anew; without a GPU steps are launched. Raises Unfit where a kernel does
        not compile or fit the card."""
        self.choices, self._graph = choices, None
        if self._device.type != "cuda":
            return
        with torch.inference_mode(), self._forward.on_stream():
            self._load(0)
            try:
                self._launch()  # kernels are loaded before capture
            except (triton.errors.TritonError, RuntimeError, AssertionError) as error:
                if isinstance(error, RuntimeError) and "PassManager" not in str(error):
                    raise  # of the device, not of the compiler
                raise Unfit(str(error)) from error  # asserts: what a launch function needs
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._launch()
            self._graph = graph

    def times_ms(self, contexts: Sequence[int], replays: int) -> list[float]:
        """Median of `replays` steps in a row, for each context."""
        assert replays < REPLAYS, f"room for {REPLAYS} steps"
        return [statistics.median(self._replay(context, replays)) for context in contexts]

    def _replay(self, context: int, replays: int) -> list[float]:
        """Milliseconds from step to step; the host runs ahead, so launches are not waited for."""
        with torch.inference_mode(), self._forward.on_stream():
            self._load(context)
            self.step()
            marks = [_mark(self._device)]
            for _ in range(replays):
                self.step()
                marks.append(_mark(self._device))
        return _between_ms(marks)

    def compile(self, wanted: Sequence[Choices], workers: int) -> None:
        """Compile what steps with these choices launch, side by side. One layer of each kind stands
        for all.

        What does not compile is found out by `capture`.
        """
        kinds = {kind: i for i, kind in enumerate(self._model.spec.every_layer())}
        with torch.inference_mode(), self._forward.on_stream(), compiling(workers, trying=True):
            for choices in wanted:
                self.choices = choices
                ops = self._ops()
                x = ops.embed(self._model.embed, None)
                for layer in kinds.values():
                    x = self._model.blocks[layer](x, ops)
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

"""The forward pass on a GPU: a CUDA graph for a step of few tokens, call by call for others.

In a graph every token is a query of its own: token t of row r attends to positions 0..p of that
row, with its K and V written first. So one graph a size serves decode rows, short prompts and any
mix of them. Sizes are padded up to the next captured one; padding reads a spare row.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor

from headrace.backends.cuda.attention import Attention, StepAttention
from headrace.backends.cuda.kv_store import CudaKvStore
from headrace.backends.cuda.ops import CudaOps, Place
from headrace.kernels import sampling
from headrace.kernels.columns import StepColumns
from headrace.kernels.draw_params import KINDS, Kind
from headrace.kernels.launch import compiled, compiling
from headrace.messages import StepPlan
from headrace.models.layers import Decoder
from headrace.runner.device_state import DeviceState, StepInput

# Tokens of a captured step. Finer where a decode batch is usual, coarser where the products are.
GRAPH_SIZES: tuple[int, ...] = (
    *(1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512),
)
GRAPH_PAIRS = 1 << 15  # query-key pairs of prompts that a graph, which shares no keys, may compute


class Forward:
    """One model on one device; owns its stream."""

    def __init__(
        self,
        model: Decoder,
        place: Place,
        state: DeviceState,
        attention: Attention,
        max_tokens: int,
    ) -> None:
        self.model, self.place, self.state = model, place, state
        self.device = state.last.device
        self._attention = attention
        draws = place.buffers.logits.shape[0]
        largest = min(max_tokens, GRAPH_SIZES[-1])
        self._sizes = [size for size in GRAPH_SIZES if size < largest] + [largest]
        self._small = StepInput(largest, draws, self.device)
        self._large = StepInput(max_tokens, draws, self.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._input = self._small
        self._pool: Any = None
        self._compiled = compiled()
        self._scratch = sampling.Scratch.allocate(draws, model.spec.vocab_size, self.device)
        cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if cuda else None

    @property
    def store(self) -> CudaKvStore:
        """The KV cache."""
        return self.place.store

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to this model's stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def run(self, plan: StepPlan, sources: list[int]) -> bool:
        """Queue a step; logits [len(sources), vocab] stand in the buffers. True: by graph."""
        tokens = sum(plan.counts)
        pairs = sum(
            count * (start + count)
            for start, count in zip(plan.starts, plan.counts, strict=True)
            if count > 1
        )
        if tokens > self._sizes[-1] or pairs > GRAPH_PAIRS:
            self._run_large(plan, tokens, sources)
            return False
        size = self._sizes[bisect_left(self._sizes, tokens)]
        self._input = self._small
        if not self._small.follows(plan):
            self._small.load(plan, sources, size, self.state.spare_row)
        graph = self._graphs.get(size)
        if graph is None:
            self._compute_small(size)
        else:
            graph.replay()
        return graph is not None

    def _run_large(self, plan: StepPlan, tokens: int, sources: list[int]) -> None:
        self._input = self._large
        self._large.load(plan, sources, tokens, self.state.spare_row)
        columns = self._columns(self._large, tokens)
        step = self._attention.mixed(columns, plan)
        ops = CudaOps(self.place, columns, self._large.ids[:tokens], step)
        self._finish(ops, self._large.sources[: len(sources)])

    def _compute_small(self, size: int) -> None:
        """What a graph of `size` tokens holds."""
        columns = self._columns(self._small, size)
        step = self._attention.singles(columns)
        ops = CudaOps(self.place, columns, self._small.ids[:size], step)
        self._finish(ops, self._small.sources[: min(size, self.place.buffers.logits.shape[0])])

    def _finish(self, ops: CudaOps, sources: Tensor) -> None:
        x = self.model(ops)
        if sources.numel():
            chosen = self.place.buffers.chosen[: sources.numel()]
            torch.index_select(x, 0, sources, out=chosen)
            self.model.logits(chosen, ops)

    def _columns(self, source: StepInput, tokens: int) -> StepColumns:
        return StepColumns(
            source.rows[:tokens],
            source.positions[:tokens],
            source.writes[:tokens],
            self.state.tables,
        )

    def sample(self, plan: StepPlan, sources: list[int], tokens: Tensor) -> None:
        """Queue the draws of the step that `run` queued last; tokens [draws] int32 is filled."""
        draws = len(plan.draw_from)
        logits = self.place.buffers.logits[: len(sources)]
        if draws != len(sources):
            at = {row: i for i, row in enumerate(sources)}
            index = torch.tensor([at[row] for row in plan.draw_from], device=self.device)
            logits = logits[index]
        self._draw(logits, draws, tokens, self.state.kind(plan.draw_into))

    def _draw(self, logits: Tensor, draws: int, tokens: Tensor, kind: Kind) -> None:
        sampling.sample(
            logits,
            self.state.params,
            self._input.positions,
            self._input.draw_tokens[:draws],
            self._input.draw_rows[:draws],
            self.state.last,
            tokens,
            kind=kind,
            scratch=self._scratch,
            with_pdl=self.place.pdl,
        )

    def compile(self, workers: int) -> None:
        """Compile every kernel that a step can need, side by side, without running one.

        One layer stands for all: a decoder's layers have one shape.
        """
        pretended = StepPlan(0, [], [], [], [[]], [0], [0], [2], [[0, 0]], [1], [], [0], [0])
        with torch.inference_mode(), self.on_stream(), compiling(workers):
            for size in self._sizes:
                columns = self._columns(self._small, size)
                self._one_layer(columns, self._small, size, self._attention.singles(columns))
            tokens = self._large.rows.shape[0]
            columns = self._columns(self._large, tokens)
            step = self._attention.mixed(columns, pretended)
            self._one_layer(columns, self._large, tokens, step)
            self._compile_sampler()
            self.state.compile()

    def _one_layer(
        self, columns: StepColumns, source: StepInput, tokens: int, step: StepAttention
    ) -> None:
        ops = CudaOps(self.place, columns, source.ids[:tokens], step)
        x = self.model.blocks[0](ops.embed(self.model.embed), ops)
        self.model.logits(x[: self.place.buffers.logits.shape[0]], ops)

    def _compile_sampler(self) -> None:
        draws = self.place.buffers.logits.shape[0]
        tokens = torch.zeros(draws, dtype=torch.int32, device=self.device)
        for kind in KINDS:
            for n in (1, draws):
                self._draw(self.place.buffers.logits[:n], n, tokens[:n], kind)

    def capture(self, limit: int | None = None) -> None:
        """Capture the graphs, the largest first: later ones find their memory in its pool.

        limit: how many; None = all.
        """
        if self._stream is None:
            return
        with torch.inference_mode(), self.on_stream():
            for size in self._sizes[::-1][:limit]:
                self._compute_small(size)  # kernels are loaded before capture
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    self._compute_small(size)
                self._pool = graph.pool()
                self._graphs[size] = graph
            self._stream.synchronize()
        self._compiled = compiled()

    @property
    def graph_count(self) -> int:
        """Graphs there are when all are captured."""
        return len(self._sizes)

    @property
    def compiles(self) -> int:
        """Kernels compiled since the graphs were captured."""
        return compiled() - self._compiled

    def close(self) -> None:
        """Wait for the device and drop the graphs."""
        if self._stream is not None:
            self._stream.synchronize()
        self._graphs.clear()
        del self.model, self.place

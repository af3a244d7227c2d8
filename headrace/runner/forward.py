"""The forward pass on a GPU: a CUDA graph for a step of few tokens, call by call for others.

Ways to run a step, by what it brings:
  alone   every token is a query of its own: token t of row r attends to positions 0..p of that
          row, with its K and V written first. Decode rows and short prompts, in any mix.
  mixed   few decode rows alone, the tokens of prompts in chunks that share the keys they read
  crowd   as mixed, with many decode rows: a graph launches programs for as many as it may hold
  eager   as mixed, but launched one by one: more tokens than a graph holds
All but the last replay a graph, padded up to the next size; padding reads a spare row. Graphs that
no first request needs are captured later (see `runner.graphs`); until then, their steps are padded
further, to the next graph that is there, or launched one by one where that is too large.

Of most steps with prompts few tokens yield logits: only those go through the last layer. How many
that may be belongs to a graph's shape. Alone any token may be drawn from, so all go through; of a
prompt whose log-probabilities or mean are wanted too, and its steps are launched one by one unless
alone.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from headrace.backends.cuda.attention import Attention, StepAttention
from headrace.backends.cuda.chunk_table import (
    MAX_CHUNKS,
    ChunkTable,
    chunk_spans,
    leading_singles,
)
from headrace.backends.cuda.flash_table import FlashTable
from headrace.backends.cuda.kv_store import CudaKvStore
from headrace.backends.cuda.latent import LatentPaths, LatentStep
from headrace.backends.cuda.ops import CudaOps, Place, Wanted
from headrace.config import Resolved
from headrace.engine.protocol import Masks
from headrace.kernels.launch import compiled, compiling, fetched
from headrace.kernels.shapes import power_of_two
from headrace.messages import StepPlan
from headrace.models.layers import Decoder
from headrace.runner.device_state import DeviceState
from headrace.runner.draws import Draws, Queued
from headrace.runner.graphs import Graphs, Key, Way
from headrace.runner.plan_check import lasts_of, sources_of, whole
from headrace.runner.pooler import Pooler
from headrace.runner.step_input import StepInput
from headrace.runner.taps import Taps

# Tokens of a captured step. Finer where a decode batch is usual, coarser where the products are.
ALONE_SIZES: tuple[int, ...] = (
    *(1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512),
)
MIXED_SIZES: tuple[int, ...] = (32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
MIXED_SINGLES = 64  # decode rows of a mixed graph
# What is captured before the first request: these numbers of single tokens, the largest of each
# way, and every mixed size, for by those the time of a step is measured.
USUAL_SIZES: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
STAND_IN = 1.25  # times the tokens of a step with prompts: the largest graph that pads it well
LIBRARY_TOKENS = 512  # of a graph: in smaller ones a library's attention gains nothing
ALONE_PAIRS = 1 << 15  # query-key pairs of prompts up to which nobody needs to share keys


def up_to(sizes: tuple[int, ...], most: int) -> list[int]:
    """The sizes below `most`, and the lesser of `most` and the last of them."""
    return [size for size in sizes if size < most] + [min(most, sizes[-1])] * (most <= sizes[-1])


def _seen() -> int:
    return compiled() + fetched()


class Forward:
    """One model on one device; owns its stream."""

    def __init__(
        self,
        model: Decoder,
        place: Place,
        state: DeviceState,
        attention: Attention | LatentPaths,
        max_tokens: int,
        *,
        graphed: bool = True,
    ) -> None:
        self.model, self.place, self.state = model, place, state
        self.device = state.last.device
        self._attention = attention
        self._blocks: Iterable[nn.Module] = model.blocks  # that a step goes through
        draws = place.buffers.logits.shape[0]
        self._draws = draws  # rows of logits there may be
        self._sizes: dict[Way, list[int]] = {
            "alone": up_to(ALONE_SIZES, max_tokens),
            "mixed": up_to(MIXED_SIZES, max_tokens),
            "crowd": [n for n in up_to(MIXED_SIZES, max_tokens) if n > MIXED_SINGLES],
            "eager": [max_tokens],
        }
        in_graphs = StepInput(self._sizes["mixed"][-1], draws, self.device)
        self._draw_sizes = [0, *(n for n in ALONE_SIZES if n < draws), draws]
        self._inputs: dict[Way, StepInput] = {
            "alone": StepInput(self._sizes["alone"][-1], draws, self.device),
            "mixed": in_graphs,
            "crowd": in_graphs,
            "eager": StepInput(max_tokens, draws, self.device),
        }
        largest = self._sizes["mixed"][-1]
        self._chunks = ChunkTable(largest, attention.tiling, self.device)
        self._library = attention.library_table(MAX_CHUNKS)
        self._input = self._inputs["alone"]  # of the step that `run` queued last
        self._logit_rows = 0  # of that step
        self._narrowed_to: list[int] | None = None  # its forward rows in `chosen`; None: all in `x`
        self._seen = _seen()
        self.sampler = Draws(
            state, place.slots, place.buffers, model.spec.vocab_size, with_pdl=place.pdl
        )
        self.pooler = Pooler(model, place.buffers, with_pdl=place.pdl)
        cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if cuda else None
        needed, later = self._graph_list() if graphed else ([], [])
        self.needed_graphs = len(needed)  # of `graphs`: those that the start waits for
        works = (self._pad, self._graph_load, self._graph_work)
        self.graphs = Graphs(self._stream, needed + later, *works)
        self.settle()

    def settle(self) -> None:
        """Let this model's stream wait for what the caller's stream was asked to do so far.

        Tables are filled on the stream of whoever makes them; without this, a step could read
        them before.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    @property
    def store(self) -> CudaKvStore:
        """The KV cache."""
        return self.place.store

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to this model's stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def way(self, plan: StepPlan) -> Way:
        """How a step is run."""
        tokens, singles = sum(plan.counts), leading_singles(plan)
        ends = zip(plan.starts[singles:], plan.counts[singles:], strict=True)
        pairs = sum(count * (start + count) for start, count in ends)
        if tokens <= self._sizes["alone"][-1] and pairs <= ALONE_PAIRS:
            return "alone"
        chunks = len(plan.counts) - singles
        if tokens > self._sizes["mixed"][-1] or chunks > MAX_CHUNKS:
            return "eager"
        sizes = self._sizes["mixed"]
        # A smaller graph's step is never padded to one of the library's: see STAND_IN.
        library = self._by_library(sizes[bisect_left(sizes, tokens)])
        if library and not library.fits(plan.starts[singles:], plan.counts[singles:]):
            return "eager"
        return "mixed" if singles <= MIXED_SINGLES else "crowd"

    def run(self, plan: StepPlan) -> Way:
        """Queue a step; the logits of its `sources_of` stand in the buffers."""
        way, tokens = self.way(plan), sum(plan.counts)
        self._input = source = self._inputs[way]
        sources = sources_of(plan)
        self._logit_rows = len(sources)
        sources += lasts_of(plan)  # they go as far, but yield no logits
        self._narrowed_to = None
        every = whole(plan)
        size = self._padded(way, tokens, every)
        if way == "alone":
            if not source.follows(plan):
                source.load(plan, sources, size, self.state.spare_row)
            self.graphs.run(way, size)
            return way
        source.load(plan, sources, size, self.state.spare_row)
        narrowed = None if every else self._narrowed(way, size, len(sources))
        if narrowed is not None:
            self._narrowed_to = sources
        if way == "eager":
            columns = source.columns(size, self.state.tables)
            self._layers(source, size, self._attention.mixed(columns, plan), narrowed)
        else:
            self._load_chunks(plan, size)
            if every:  # any token may be asked about: all go through the last layer
                self._layers(source, size, self._step(way, size), None)
            else:
                self.graphs.run(way, size)
        self._logits(source, size, self._logit_rows, narrowed)
        return way

    def _by_library(self, size: int) -> FlashTable | None:
        """Where a graph of `size` tokens reads a library's chunks; None: its chunks are ours."""
        library = self._library
        has = library is not None and library.ready and size >= LIBRARY_TOKENS
        return library if has else None

    def _load_chunks(self, plan: StepPlan, size: int) -> None:
        first = leading_singles(plan)
        if library := self._by_library(size):
            library.load(chunk_spans(plan, first))
        else:
            self._chunks.load(plan, first, size)

    def _padded(self, way: Way, tokens: int, every: bool) -> int:
        """Tokens of the step with its padding. `every`: all go through the last layer."""
        if way == "eager":
            return tokens
        sizes = self._sizes[way]
        at = bisect_left(sizes, tokens)
        if way == "alone":  # reads the weights, however many tokens there are
            return self.graphs.expect(way, sizes[at], sizes[at + 1 :])
        most = sizes[at] * STAND_IN
        larger = [size for size in sizes[at + 1 :] if size <= most]
        return sizes[at] if every else self.graphs.expect(way, sizes[at], larger)

    def _narrowed(self, way: Way, size: int, wanted: int) -> int | None:
        """How many tokens go through the last layer; None: all `size` of the step.

        wanted: tokens that yield logits. A graph holds as many as any of its steps may want, a step
        that is launched call by call as many as some decode graph, whose kernels are compiled.
        """
        if way == "alone":
            return None
        if way == "eager":
            narrowed = self._draw_sizes[bisect_left(self._draw_sizes, wanted)]
        else:
            rows = size if way == "crowd" else MIXED_SINGLES + MAX_CHUNKS
            narrowed = min(self._draws, rows)
        assert wanted <= narrowed, f"{wanted} rows of logits, {narrowed} fit a {way} step"
        return narrowed if narrowed < size else None

    def _pad(self, way: Way, size: int) -> None:
        """The columns of a step of that size in which every token is padding: the cache, the tables
        and the columns of the other ways stay as they are."""
        self._inputs[way].pad(size, self.state.spare_row)
        if way != "alone":
            self._chunks.clear(size)
            if self._library is not None:
                self._library.clear()

    def _graph_load(self, way: Way, size: int) -> None:
        """Launch every kernel that the graph of that size holds."""
        with self.fewer_layers():
            self._graph_work(way, size)

    @contextlib.contextmanager
    def fewer_layers(self) -> Iterator[None]:
        """Inside, steps go through as few layers as launch all kernels of a step, and take all the
        memory that one takes. Their logits are of no use."""
        every = self.model.spec.foreign  # nobody knows what each of those launches
        self._blocks = self.model.blocks if every else self._each_kind()
        try:
            yield
        finally:
            self._blocks = self.model.blocks

    def _each_kind(self) -> list[nn.Module]:
        """Blocks that launch whatever all do: the first of each kind, for the matrices of a kind
        have one shape, with copies of its experts and without, and the last."""
        mixture = self.place.buffers.mixture
        copied = {} if mixture is None else mixture.copies
        kinds = {
            (kind, i in copied): i
            for i, kind in reversed([*enumerate(self.model.spec.every_layer())])
        }
        return [self.model.blocks[i] for i in (*kinds.values(), -1)]

    def _graph_work(self, way: Way, size: int) -> None:
        """What the graph of that size holds. Only a step of single tokens has its logits there:
        as many as tokens. Of a step with prompts most tokens are not drawn from."""
        source = self._inputs[way]
        self._layers(source, size, self._step(way, size), self._narrowed(way, size, 0))
        if way == "alone":
            self._logits(source, size, min(size, self._draws), None)

    def _step(self, way: Way, size: int) -> StepAttention | LatentStep:
        source, tables = self._inputs[way], self.state.tables
        if way == "alone":
            return self._attention.singles(source.columns(size, tables))
        singles = min(size, MIXED_SINGLES) if way == "mixed" else size
        columns = source.singles(size, tables)
        if library := self._by_library(size):
            planned = library.planned(size, tables[0])  # of the one group that its models have
            return self._attention.chunked(columns, singles, None, planned)
        return self._attention.chunked(columns, singles, self._chunks.chunks(size))

    def _ops(
        self,
        source: StepInput,
        tokens: int,
        step: StepAttention | LatentStep,
        narrowed: int | None = None,
    ) -> CudaOps:
        columns, wanted = source.columns(tokens, self.state.tables), None
        if narrowed is not None:
            alone = self._attention.singles(source.wanted(narrowed, self.state.tables))
            rows = source.wanted_rows[:narrowed]
            wanted = Wanted(source.sources[:narrowed], alone, rows)
        return CudaOps(self.place, columns, source.ids[:tokens], step, wanted)

    def _layers(
        self, source: StepInput, tokens: int, step: StepAttention | LatentStep, narrowed: int | None
    ) -> None:
        """The hidden states of the step's tokens, into the buffer of the residual stream; of those
        that are left where the step is narrowed, into the buffer `chosen`."""
        x = self.model.through(self._blocks, self._ops(source, tokens, step, narrowed))
        buffers = self.place.buffers
        stream = buffers.x if narrowed is None else buffers.chosen
        assert narrowed == 0 or x.data_ptr() == stream.data_ptr(), "the stream left its buffer"

    def _logits(self, source: StepInput, tokens: int, count: int, narrowed: int | None) -> None:
        if count:
            chosen = self.place.buffers.chosen[:count]
            if narrowed is None:
                x = self.place.buffers.x[:tokens]
                torch.index_select(x, 0, source.sources[:count], out=chosen)
            alone = self._attention.singles(source.columns(count, self.state.tables))
            self.model.logits(chosen, self._ops(source, count, alone))

    def sample(
        self, plan: StepPlan, tokens: Tensor, masks: Masks | None, taps: Taps | None = None
    ) -> Queued:
        """Queue the draws of the step that `run` queued last; see `Draws.queue`."""
        logits = self.place.buffers.logits[: self._logit_rows]
        return self.sampler.queue(plan, self._input, logits, tokens, masks, taps)

    def logits_of(self, tokens: Tensor) -> Tensor:
        """Logits [n, vocab] under tokens [n] int32 of the step that `run` queued last, at most as
        many as the buffer holds. What it held before is lost. Needs: the step was alone, or is
        `whole`.
        """
        count, buffers = tokens.shape[0], self.place.buffers
        chosen = torch.index_select(buffers.x, 0, tokens, out=buffers.chosen[:count])
        columns = self._input.columns(count, self.state.tables)
        return self.model.logits(
            chosen, self._ops(self._input, count, self._attention.singles(columns))
        )

    def pool(self, plan: StepPlan) -> None:
        """Queue the vectors of the step that `run` queued last, into those of `pooler`.

        Comes before `logits_of`.
        """
        ends = list(accumulate(plan.counts))
        scored = any(kind == "scores" for _, kind in plan.pools)
        if self._narrowed_to is not None:
            at = {row: i for i, row in enumerate(self._narrowed_to)}
            spans = [(at[row], 1) for row, _ in plan.pools]
            self.pooler.queue(self.place.buffers.chosen[: len(at)], spans, scored=scored)
            return
        spans = [
            (ends[row] - plan.counts[row], plan.counts[row])
            if kind == "sum"
            else (ends[row] - 1, 1)
            for row, kind in plan.pools
        ]
        self.pooler.queue(self.place.buffers.x[: ends[-1]], spans, scored=scored)

    # ------------------------------------------------------------ before the first request

    def compile(self, workers: int) -> None:
        """Compile every kernel that a step can need, side by side, without running one."""
        blocks = self._each_kind()
        with torch.inference_mode(), self.on_stream(), compiling(workers):
            self.sampler.compile(self._input, self.place.buffers.logits)  # the longest first
            needed, later = self._graph_list()
            for way, size in [*needed, *later, ("eager", self._sizes["eager"][-1])]:
                like: Way = "mixed" if way == "eager" else way
                step = self._step(like, min(size, self._sizes[like][-1]))
                wanted = min(size, self._draws) if way == "eager" else 0
                ops = self._ops(self._inputs[way], size, step, self._narrowed(way, size, wanted))
                x = self.model.through(blocks, ops)
                self.model.logits(x[: self._draws], ops)
            eager = self._inputs["eager"]
            for singles in self._crowds():
                step = self._attention.singles(eager.columns(singles, self.state.tables))
                self.model.through(blocks, self._ops(eager, singles, step))
            columns = self._inputs["eager"].columns(2, self.state.tables)
            self._attention.compile(self.model, columns, self.store.k[0])
            self.pooler.compile()
            self.state.compile()
            self.store.compile()

    def _crowds(self) -> list[int]:
        """Of more single tokens than a graph holds: one number for each kernel that they need, as
        of each power of two decode attention has its own."""
        most = min(self._draws, self._sizes["eager"][-1])
        padded = power_of_two(self._sizes["mixed"][-1]), power_of_two(most)
        return [min(1 << bit, most) for bit in range(*(size.bit_length() for size in padded))]

    def prepare_attention(self) -> Resolved[str]:
        """Plan what the attention of long prompts needs planned -> what was chosen, and why.

        Raises ConfigError where what was asked for fails.
        """
        with torch.inference_mode(), self.on_stream():
            return self._attention.prepare(self.store.k[0], self.store.v[0], self.state.tables[0])

    def capture(self, first: int | None = None) -> None:
        """Capture graphs, the largest first: later ones find their memory in its pool.

        first: how many; the others are put off. None = those that the start needs.
        """
        with torch.inference_mode(), self.on_stream():
            self.graphs.capture(self.needed_graphs if first is None else first)
        if self._stream is not None:
            self._stream.synchronize()
        self._seen = _seen()

    def capture_next(self) -> bool:
        """Capture one that was put off, in some 50 ms; False if there is none.

        Needs: the draws of the step that `run` queued last are queued too.
        """
        with torch.inference_mode(), self.on_stream():
            return self.graphs.capture_next()

    def _graph_list(self) -> tuple[list[Key], list[Key]]:
        """Graphs that the start waits for, the largest first; the others, the likeliest first."""
        crowd, alone = self._sizes["crowd"], self._sizes["alone"]
        first = {size for size in alone if size in USUAL_SIZES} | {alone[-1]}
        needed: list[Key] = [("crowd", size) for size in crowd[-1:]]
        needed += [("mixed", size) for size in reversed(self._sizes["mixed"])]
        needed += [("alone", size) for size in sorted(first, reverse=True)]
        later: list[Key] = [("alone", size) for size in alone if size not in first]
        return needed, later + [("crowd", size) for size in crowd[:-1]]

    @property
    def compiles(self) -> int:
        """Kernels compiled, or fetched from the cache on disk, since `capture`."""
        return _seen() - self._seen

    def close(self) -> None:
        """Wait for the device and drop the graphs."""
        if self._stream is not None:
            self._stream.synchronize()
        self.graphs.close()
        del self.model, self._blocks, self.place, self.sampler, self.pooler, self.graphs

"""Latent attention of one step on a GPU: which tokens attend in the latent space, and which over
keys and values made anew.

Single tokens, and chunks in a captured graph, go to where the lines of the cache are: their queries
are absorbed, what comes out is a sum of latents, of which each head makes its values. The chunks of
a step that is launched call by call get the keys and values of their whole contexts expanded, as
far as there is room; else they too stay in the latent space.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.backends.cuda.chunk_library import PlannedChunks
from headrace.backends.cuda.chunk_table import leading_singles
from headrace.backends.cuda.upload import Upload
from headrace.config import Resolved
from headrace.kernels import pdl
from headrace.kernels.attention_decode import most_splits
from headrace.kernels.attention_prefill import PrefillScratch
from headrace.kernels.chunks import Chunks, Tiling
from headrace.kernels.columns import GroupColumns
from headrace.kernels.latent import LatentShape, absorb, value_up
from headrace.kernels.latent_decode import head_group, latent_decode, latent_scratch
from headrace.kernels.latent_dense import (
    DenseKeys,
    gather_lines,
    latent_dense,
    latent_dense_config,
)
from headrace.kernels.latent_prefill import latent_prefill, latent_prefill_config
from headrace.messages import StepPlan
from headrace.models.latent import LatentAttention
from headrace.models.layers import Decoder
from headrace.models.spec import ModelSpec

DENSE_TOKENS = 16384  # keys that a step may have expanded, unless its own tokens are more


def shape_of(spec: ModelSpec) -> LatentShape:
    """As the kernels have it."""
    latent = spec.latent
    assert latent is not None, "a model of latent attention"
    return LatentShape(
        spec.heads, latent.kv_rank, latent.plain_dim, latent.rope_dim, latent.value_dim
    )


class LatentPaths:
    """What the steps of one model share: scratch memory, tables, the shape of its heads."""

    def __init__(
        self,
        spec: ModelSpec,
        multiprocessors: int,
        max_tokens: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape = shape_of(spec)
        self.with_pdl = pdl.supported(device)
        self.splits = most_splits(shape.heads // head_group(shape.heads), multiprocessors)
        self.scratch = latent_scratch(max_tokens, shape, self.splits, device)
        config = latent_prefill_config(dtype)
        self.tiling = Tiling(shape.heads, 1, config.rows, config.tile_keys, multiprocessors)
        self.parts = PrefillScratch(self.tiling, shape.rank, device)
        dense = latent_dense_config(dtype)
        self.dense_tiling = Tiling(1, shape.heads, dense.rows, dense.tile_keys, 0)
        self.keys = max(DENSE_TOKENS, max_tokens)

        def rows(count: int, *width: int) -> Tensor:
            return torch.zeros((count, *width), dtype=dtype, device=device)

        self.wide = rows(max_tokens, shape.heads, shape.line)
        self.sums = rows(max_tokens, shape.heads, shape.rank)
        self.lines = rows(self.keys, shape.line)
        self.up = rows(self.keys, shape.heads * (shape.nope + shape.dv))
        words = max(
            self.tiling.words(max_tokens, max_rows),
            self.dense_tiling.words(max_tokens, max_rows) + 2 * max_rows,
        )
        self._upload = Upload((words,), device)
        self._plan = torch.zeros(words, dtype=torch.int32, device=device)

    def prepare(self, k: Tensor, v: Tensor, tables: Tensor) -> Resolved[str]:
        """-> which kernels chunks go to, and why."""
        return Resolved("triton", "keys of latent attention are no library's")

    def singles(self, columns: GroupColumns) -> LatentStep:
        """A step in which every token is a query of its own."""
        return LatentStep(self, columns, columns[0].rows.shape[0], None, None)

    def library_table(self, chunks: int) -> None:
        """No library's chunks are in graphs."""

    def chunked(
        self,
        columns: GroupColumns,
        singles: int,
        chunks: Chunks | None,
        planned: PlannedChunks | None = None,
    ) -> LatentStep:
        """A step of a captured graph: `singles` tokens alone, then chunks."""
        assert planned is None, "no library has chunks of latent attention"
        return LatentStep(self, columns, singles, chunks, None)

    def mixed(self, columns: GroupColumns, plan: StepPlan) -> LatentStep:
        """A step as the plan has it: single tokens first, then chunks."""
        singles = leading_singles(plan)
        if singles == len(plan.counts):
            return self.singles(columns)
        firsts = (np.cumsum(plan.counts) - plan.counts).tolist()
        parts = (plan.rows, plan.starts, plan.counts, firsts)
        return self.of_chunks(columns, singles, *(part[singles:] for part in parts))

    def of_chunks(
        self,
        columns: GroupColumns,
        singles: int,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        firsts: Sequence[int],
    ) -> LatentStep:
        """Chunks of a step that is launched call by call; their tables go to the device."""
        ends = np.array(starts, np.int32) + np.array(counts, np.int32)
        keys, dense = int(ends.sum()), int(ends.sum()) <= self.keys
        tiling = self.dense_tiling if dense else self.tiling
        words = Chunks.plan(rows, starts, counts, firsts, tiling)
        if dense:
            words = np.concatenate((words, ends, np.cumsum(ends) - ends)).astype(np.int32)
        self._upload.slot()[: words.size] = words
        self._upload.send(self._plan, words.size)
        n, plan = len(rows), self._plan[: words.size]
        if not dense:
            return LatentStep(self, columns, singles, Chunks.of(plan, n, tiling.rows), None)
        chunks = Chunks.of(plan[: -2 * n], n, tiling.rows)
        of_keys = DenseKeys(chunks, plan[-n:], plan[-2 * n : -n], keys, int(ends.max()))
        return LatentStep(self, columns, singles, None, of_keys)

    def compile(self, model: Decoder, columns: GroupColumns, cache: Tensor) -> None:
        """Launch what only `mixed` may launch, for `kernels.launch.compiling`."""
        attention = model.blocks[0].latent
        assert isinstance(attention, LatentAttention), "a model of latent attention"
        q = self.wide.new_zeros((2, self.shape.heads, self.shape.query))
        out = self.wide.new_zeros((2, self.shape.heads * self.shape.dv))
        step = self.of_chunks(columns, 0, [0], [0], [2], [0])
        step.attend(attention, q, cache, out)


class LatentStep:
    """Tokens [0, singles) alone; `chunks` in the latent space, `dense` over what was expanded."""

    def __init__(
        self,
        shared: LatentPaths,
        columns: GroupColumns,
        singles: int,
        chunks: Chunks | None,
        dense: DenseKeys | None,
    ) -> None:
        self._shared, self._singles = shared, singles
        self._chunks, self._dense = chunks, dense
        (of_group,) = columns  # no model has latent attention and windows
        self.tables, self._alone = of_group.tables, of_group.first(singles)

    def attend(self, attention: LatentAttention, q: Tensor, cache: Tensor, out: Tensor) -> Tensor:
        """q [T, heads, nope + rope]; cache: a layer's, where the step's lines are already -> out
        [T, heads * dv]."""
        shared, shape = self._shared, self._shared.shape
        weight, values = attention.kv_up.weight, out.view(-1, shape.heads, shape.dv)
        absorbed = q.shape[0] if self._chunks is not None else self._singles
        if absorbed:
            wide = absorb(
                q[:absorbed], weight, shape, out=shared.wide[:absorbed], with_pdl=shared.with_pdl
            )
            sums = shared.sums[:absorbed]
            if self._singles:
                latent_decode(
                    wide[: self._singles], cache, self._alone, shape,
                    scale=attention.scale, splits=shared.splits, scratch=shared.scratch,
                    out=sums[: self._singles], with_pdl=shared.with_pdl,
                )  # fmt: skip
            if self._chunks is not None:
                latent_prefill(
                    wide, cache, self.tables, self._chunks, shape,
                    scale=attention.scale, scratch=shared.parts, out=sums, with_pdl=shared.with_pdl,
                )  # fmt: skip
            value_up(sums, weight, shape, out=values[:absorbed], with_pdl=shared.with_pdl)
        if self._dense is not None:
            keys, plan = self._dense.keys, self._dense
            lines, up = shared.lines[:keys], shared.up[:keys]
            gather_lines(cache, self.tables, plan, out=lines, with_pdl=shared.with_pdl)
            torch.mm(lines[:, : shape.rank], weight.t(), out=up)
            latent_dense(
                q, up.view(keys, shape.heads, -1), lines, plan, shape,
                scale=attention.scale, out=values, with_pdl=shared.with_pdl,
            )  # fmt: skip
        return out

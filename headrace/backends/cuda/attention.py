"""Attention of one step over the paged cache: which kernel takes which tokens.

Single tokens are queries of their own: decode rows, and in a graph the tokens of short prompts too.
Rows that bring several tokens are chunks, which share the keys they read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headrace.backends.cuda.upload import Upload
from headrace.kernels.attention_configs import prefill_config
from headrace.kernels.attention_decode import Scratch, decode, most_splits
from headrace.kernels.attention_prefill import prefill
from headrace.kernels.chunks import Chunks
from headrace.kernels.columns import StepColumns
from headrace.kernels.tuned import Decoding
from headrace.messages import StepPlan
from headrace.models.spec import ModelSpec


class Attention:
    """What the steps of one model share: scratch memory and the shape of its heads.

    `decoding`: how that many single tokens attend, with at most `most_splits` splits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        multiprocessors: int,
        max_tokens: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        decoding: Callable[[int], Decoding],
    ) -> None:
        self.scale = spec.head_dim**-0.5
        self.decoding = decoding
        splits = most_splits(spec.kv_heads, multiprocessors)
        self.scratch = Scratch(max_tokens, spec.heads, spec.head_dim, spec.kv_heads, splits, device)
        self.group = spec.heads // spec.kv_heads
        self.tile_rows = prefill_config(dtype, spec.head_dim).rows
        tiles = max_rows + max_tokens * self.group // self.tile_rows
        self._upload = Upload((4 * max_rows + 2 * tiles,), device)
        self._plan = torch.zeros(4 * max_rows + 2 * tiles, dtype=torch.int32, device=device)

    def singles(self, columns: StepColumns) -> StepAttention:
        """A step in which every token is a query of its own."""
        return StepAttention(self, columns, columns.rows.shape[0], None)

    def mixed(self, columns: StepColumns, plan: StepPlan) -> StepAttention:
        """A step as the plan has it: single tokens first, then chunks."""
        singles = next((i for i, count in enumerate(plan.counts) if count > 1), len(plan.counts))
        if singles == len(plan.counts):
            return self.singles(columns)
        firsts = (np.cumsum(plan.counts) - plan.counts)[singles:]
        words = Chunks.plan(
            plan.rows[singles:],
            plan.starts[singles:],
            plan.counts[singles:],
            firsts.tolist(),
            group=self.group,
            tile_rows=self.tile_rows,
        )
        self._upload.slot()[: words.size] = words
        self._upload.send(self._plan, words.size)
        chunks = Chunks.of(self._plan[: words.size], len(firsts), self.tile_rows)
        return StepAttention(self, columns, singles, chunks)


class StepAttention:
    """Tokens [0, singles) alone, the rest in chunks."""

    def __init__(
        self, shared: Attention, columns: StepColumns, singles: int, chunks: Chunks | None
    ) -> None:
        self._shared, self._singles, self._chunks = shared, singles, chunks
        self._columns = columns
        self._alone = StepColumns(
            columns.rows[:singles],
            columns.positions[:singles],
            columns.writes[:singles],
            columns.tables,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """q, out [T, heads, d]; k, v a layer's cache, where the step's own k and v are already."""
        shared, singles = self._shared, self._singles
        if singles:
            config, splits = shared.decoding(singles)
            decode(
                q[:singles],
                k,
                v,
                self._alone,
                scale=shared.scale,
                splits=splits,
                scratch=shared.scratch,
                out=out[:singles],
                config=config,
            )
        if self._chunks is not None:
            prefill(q, k, v, self._columns.tables, self._chunks, scale=shared.scale, out=out)

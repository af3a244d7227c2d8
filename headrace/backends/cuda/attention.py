"""Attention of one step over the paged cache: which kernel takes which tokens.

Single tokens are queries of their own: decode rows, and in a graph the tokens of short prompts too.
Rows that bring several tokens are chunks, which share the keys they read; the first chunk of a long
prompt goes to cuDNN where `Attention.prepare` has planned its size, or a library takes what it can:
see `chunk_choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.backends.cuda.chunk_choice import ChunkChoice
from headrace.backends.cuda.chunk_library import PlannedChunks
from headrace.backends.cuda.chunk_table import chunk_spans, leading_singles
from headrace.backends.cuda.flash_chunks import FlashChunks
from headrace.backends.cuda.flash_table import FlashTable
from headrace.backends.cuda.upload import Upload
from headrace.config import PrefillAttention, Resolved
from headrace.kernels.attention_configs import prefill_config
from headrace.kernels.attention_decode import Scratch, decode, most_splits
from headrace.kernels.attention_prefill import PrefillScratch, prefill
from headrace.kernels.chunks import Chunks, Tiling
from headrace.kernels.columns import GroupColumns
from headrace.kernels.dense_prefill import Span
from headrace.kernels.tuned import Decoding
from headrace.messages import StepPlan
from headrace.models.layers import Attention as LayerAttention
from headrace.models.layers import Decoder
from headrace.models.spec import ModelSpec


class Attention:
    """What the steps of one model share: scratch memory and the shape of its heads.

    `decoding`: how that many single tokens attend, with at most `most_splits` splits.
    `choice`: the setting `prefill_attention`. Raises ConfigError where that cannot be had.
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
        choice: PrefillAttention = "auto",
    ) -> None:
        self.choice = ChunkChoice(choice, spec, max_tokens, dtype, device)
        self._device = device
        self._slopes: dict[tuple[float, ...], Tensor] = {}
        self.scale = spec.head_dim**-0.5
        self.decoding = decoding
        splits = most_splits(spec.kv_heads, multiprocessors)
        self.scratch = Scratch(max_tokens, spec.heads, spec.head_dim, spec.kv_heads, splits, device)
        config = prefill_config(dtype, spec.head_dim)
        self.tiling = Tiling(
            group=spec.heads // spec.kv_heads,
            kv_heads=spec.kv_heads,
            rows=config.rows,
            keys=config.tile_keys,
            places=multiprocessors * config.resident,
        )
        self.parts = PrefillScratch(self.tiling, spec.head_dim, device)
        words = self.tiling.words(max_tokens, max_rows)
        self._upload = Upload((words,), device)
        self._plan = torch.zeros(words, dtype=torch.int32, device=device)

    def slopes(self, layer: LayerAttention) -> Tensor | None:
        """ALiBi's, on the device; made when a layer is first asked for, before any capture."""
        if not layer.slopes:
            return None
        if layer.slopes not in self._slopes:
            self._slopes[layer.slopes] = torch.tensor(layer.slopes, device=self._device)
        return self._slopes[layer.slopes]

    def prepare(self, k: Tensor, v: Tensor, tables: Tensor) -> Resolved[str]:
        """Plan the sizes that cuDNN takes, in seconds, or make the library ready -> which one
        chunks go to, and why.

        k, v: the cache of any layer. Call in the thread that will launch steps, on its stream;
        without it our kernel does all. Raises ConfigError where the library fails.
        """
        return self.choice.prepare(k, v, tables)

    def compile(self, model: Decoder, columns: GroupColumns, cache: Tensor) -> None:
        """Launch what only `mixed` may launch, for `kernels.launch.compiling`."""
        self.choice.compile(cache, columns[0].tables)

    def singles(self, columns: GroupColumns) -> StepAttention:
        """A step in which every token is a query of its own."""
        return StepAttention(self, columns, columns[0].rows.shape[0], None)

    def chunked(
        self,
        columns: GroupColumns,
        singles: int,
        chunks: Chunks | None,
        planned: PlannedChunks | None = None,
    ) -> StepAttention:
        """A step of a captured graph: `singles` tokens alone, then chunks, of ours or a library.

        Chunks may begin before token `singles`: what those alone wrote there is overwritten.
        """
        return StepAttention(self, columns, singles, chunks, planned=planned)

    def library_table(self, chunks: int) -> FlashTable | None:
        """Where graphs read a library's chunks; None where no library has any there."""
        library = self.choice.library
        if not isinstance(library, FlashChunks):
            return None
        return FlashTable(library, chunks, self._device)

    def mixed(self, columns: GroupColumns, plan: StepPlan) -> StepAttention:
        """A step as the plan has it: single tokens first, then chunks."""
        singles = leading_singles(plan)
        if singles == len(plan.counts):
            return self.singles(columns)
        spans = chunk_spans(plan, singles)
        library, planned = self.choice.library, None
        if library is not None and library.ready:
            planned, spans = library.plan(spans, columns[0].tables)
        sizes = [self._dense_size(span) for span in spans]
        dense = [(span, size) for span, size in zip(spans, sizes, strict=True) if size]
        paged = [span for span, size in zip(spans, sizes, strict=True) if not size]
        return StepAttention(self, columns, singles, self._chunks(paged), dense, planned)

    def _dense_size(self, span: Span) -> int:
        dense = self.choice.dense
        return 0 if dense is None else dense.fitting(span.start, span.count, span.first)

    def _chunks(self, spans: list[Span]) -> Chunks | None:
        """On their way to the device; None for none."""
        if not spans:
            return None
        words = Chunks.plan(
            [span.row for span in spans],
            [span.start for span in spans],
            [span.count for span in spans],
            [span.first for span in spans],
            self.tiling,
        )
        self._upload.slot()[: words.size] = words
        self._upload.send(self._plan, words.size)
        return Chunks.of(self._plan[: words.size], len(spans), self.tiling.rows)


class StepAttention:
    """Tokens [0, singles) alone, the rest in chunks; `dense`: those of cuDNN, with their sizes;
    `planned`: those of a library."""

    def __init__(
        self,
        shared: Attention,
        columns: GroupColumns,
        singles: int,
        chunks: Chunks | None,
        dense: Sequence[tuple[Span, int]] = (),
        planned: PlannedChunks | None = None,
    ) -> None:
        self._shared, self._singles, self._chunks = shared, singles, chunks
        self._dense, self._planned = dense, planned
        self._tables = [of_group.tables for of_group in columns]
        self._alone = [of_group.first(singles) for of_group in columns]

    def attend(
        self, attention: LayerAttention, q: Tensor, k: Tensor, v: Tensor, out: Tensor, group: int
    ) -> Tensor:
        """q, out [T, heads, d]; k, v the cache of a layer of KV group `group`, where the step's own
        k and v are already.

        Where dense chunks may come, q's memory goes on for `PADDING` rows at both ends. Returns
        `out`, or in its stead what cuDNN wrote, where that has a row for every token.
        """
        out = self._attend_dense(q, k, v, out)
        shared, singles = self._shared, self._singles
        how: dict[str, Any] = {
            "scale": attention.scale,
            "window": attention.window,
            "softcap": attention.softcap,
            "sinks": attention.sinks,
            "slopes": shared.slopes(attention),
        }
        if singles:
            config, splits = shared.decoding(singles)
            decode(
                q[:singles],
                k,
                v,
                self._alone[group],
                **how,
                splits=splits,
                scratch=shared.scratch,
                out=out[:singles],
                config=config,
            )
        if self._planned is not None:
            self._planned.attend(q, k, v, out)
        if self._chunks is not None:
            prefill(
                q,
                k,
                v,
                self._tables[group],
                self._chunks,
                **how,
                scratch=shared.parts,
                out=out,
            )
        return out

    def _attend_dense(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """For models of one KV group: what cuDNN takes has no windows."""
        tokens, dense = q.shape[0], self._shared.choice.dense
        for i, (span, size) in enumerate(self._dense):
            assert dense is not None, "no plan has dense chunks without"
            y = dense.attend(span, size, q, k, v, self._tables[0])
            before = span.start - span.first  # rows of y before the step's first token
            if i == 0 and 0 <= before <= size - tokens and y.is_contiguous():
                out = y[before : before + tokens]
            else:
                own = y[span.start : span.start + span.count]
                out[span.first : span.first + span.count].copy_(own)
        return out

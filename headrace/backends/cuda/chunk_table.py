"""The chunks of a step in memory of a fixed place and size: what a captured graph reads."""

from __future__ import annotations

import numpy as np
import torch

from headrace.backends.cuda.upload import Upload
from headrace.kernels.chunks import Chunks, Tiling
from headrace.kernels.dense_prefill import Span
from headrace.messages import StepPlan

MAX_CHUNKS = 64


def leading_singles(plan: StepPlan) -> int:
    """The rows of one token that a plan begins with: its decode rows, if it has chunks too."""
    return next((i for i, count in enumerate(plan.counts) if count > 1), len(plan.counts))


def chunk_spans(plan: StepPlan, first: int) -> list[Span]:
    """The rows of `plan` from `first` on."""
    firsts = (np.cumsum(plan.counts) - plan.counts).tolist()
    parts = (plan.rows, plan.starts, plan.counts, firsts)
    return [Span(*span) for span in zip(*(part[first:] for part in parts), strict=True)]


class ChunkTable:
    """Room for `MAX_CHUNKS` chunks of at most `tokens` tokens in all. Unused tiles: chunk -1."""

    def __init__(self, tokens: int, tiling: Tiling, device: torch.device) -> None:
        self._tiling = tiling
        words = tiling.words(tokens, MAX_CHUNKS)
        self._upload = Upload((words,), device)
        self._device = torch.full((words,), -1, dtype=torch.int32, device=device)

    def chunks(self, tokens: int) -> Chunks:
        """What a graph of `tokens` tokens reads."""
        words = self._tiling.words(tokens, MAX_CHUNKS)
        return Chunks.of(self._device[:words], MAX_CHUNKS, self._tiling.rows)

    def load(self, plan: StepPlan, first: int, tokens: int) -> None:
        """Write the rows of `plan` from `first` on as chunks, for a graph of `tokens` tokens."""
        rows = range(first, len(plan.rows))
        assert len(rows) <= MAX_CHUNKS, f"{len(rows)} chunks, {MAX_CHUNKS} fit"
        firsts = np.cumsum(plan.counts) - plan.counts
        words = Chunks.plan(
            [plan.rows[i] for i in rows],
            [plan.starts[i] for i in rows],
            [plan.counts[i] for i in rows],
            [int(firsts[i]) for i in rows],
            self._tiling,
        )
        slot, n = self._upload.slot(), len(rows)
        size = self._tiling.words(tokens, MAX_CHUNKS)
        slot[:size] = -1
        columns = slot[: 4 * MAX_CHUNKS].reshape(4, MAX_CHUNKS)
        columns[:, :n] = words[: 4 * n].reshape(4, n)
        tiles = words[4 * n :]
        slot[4 * MAX_CHUNKS : 4 * MAX_CHUNKS + tiles.size] = tiles
        self._upload.send(self._device, size)

    def clear(self, tokens: int) -> None:
        """No chunk, for a graph of `tokens` tokens."""
        size = self._tiling.words(tokens, MAX_CHUNKS)
        self._upload.slot()[:size] = -1
        self._upload.send(self._device, size)

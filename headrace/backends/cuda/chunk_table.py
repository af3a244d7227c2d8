"""The chunks of a step in memory of a fixed place and size: what a captured graph reads."""

from __future__ import annotations

import numpy as np
import torch

from headrace.backends.cuda.upload import Upload
from headrace.kernels.chunks import Chunks
from headrace.messages import StepPlan

MAX_CHUNKS = 64


class ChunkTable:
    """Room for `MAX_CHUNKS` chunks of at most `tokens` tokens in all. Unused tiles: chunk -1."""

    def __init__(self, tokens: int, group: int, tile_rows: int, device: torch.device) -> None:
        self._group, self._tile_rows = group, tile_rows
        words = 4 * MAX_CHUNKS + 2 * self._tiles(tokens)
        self._upload = Upload((words,), device)
        self._device = torch.full((words,), -1, dtype=torch.int32, device=device)

    def _tiles(self, tokens: int) -> int:
        """The most tiles of that many tokens: one more than full ones for each chunk."""
        return tokens * self._group // self._tile_rows + MAX_CHUNKS

    def chunks(self, tokens: int) -> Chunks:
        """What a graph of `tokens` tokens reads."""
        words = 4 * MAX_CHUNKS + 2 * self._tiles(tokens)
        return Chunks.of(self._device[:words], MAX_CHUNKS, self._tile_rows)

    def load(self, plan: StepPlan, tokens: int) -> None:
        """Write the chunks of `plan`, at most MAX_CHUNKS, for a graph of `tokens` tokens."""
        rows = [i for i, count in enumerate(plan.counts) if count > 1]
        assert len(rows) <= MAX_CHUNKS, f"{len(rows)} chunks, {MAX_CHUNKS} fit"
        firsts = np.cumsum(plan.counts) - plan.counts
        words = Chunks.plan(
            [plan.rows[i] for i in rows],
            [plan.starts[i] for i in rows],
            [plan.counts[i] for i in rows],
            [int(firsts[i]) for i in rows],
            group=self._group,
            tile_rows=self._tile_rows,
        )
        slot, n = self._upload.slot(), len(rows)
        size = 4 * MAX_CHUNKS + 2 * self._tiles(tokens)
        slot[:size] = -1
        columns = slot[: 4 * MAX_CHUNKS].reshape(4, MAX_CHUNKS)
        columns[:, :n] = words[: 4 * n].reshape(4, n)
        tiles = words[4 * n :]
        slot[4 * MAX_CHUNKS : 4 * MAX_CHUNKS + tiles.size] = tiles
        self._upload.send(self._device, size)

"""The chunks of a step for FlashAttention 3 in memory of a fixed place and size: what a captured
graph reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.backends.cuda.flash_chunks import Call, FlashChunks, GatheredChunks
from headrace.backends.cuda.upload import Upload
from headrace.kernels.dense_prefill import Span
from headrace.kernels.gather_keys import TILE, TILE_WORDS, Places, room_of


class FlashTable:
    """Room for `chunks` chunks whose sequences fit the library's buffer together. Unused ones have
    no query and no key, unused tiles row -1."""

    def __init__(self, library: FlashChunks, chunks: int, device: torch.device) -> None:
        self._library, self._most = library, chunks
        self._tiles = library.room // TILE
        words = 3 * chunks + 2 + TILE_WORDS * self._tiles
        self._upload = Upload((words,), device)
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self.clear()

    @property
    def ready(self) -> bool:
        """The library is: graphs that are captured now may have its chunks."""
        return self._library.ready

    def fits(self, starts: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether chunks of `counts` tokens behind `starts` have room."""
        ends = zip(starts, counts, strict=True)
        filled = sum(room_of(start + count) for start, count in ends)
        return len(starts) <= self._most and filled <= self._library.room

    def planned(self, tokens: int, tables: Tensor) -> GatheredChunks:
        """What a graph of `tokens` tokens reads."""
        n = self._most
        begins, lengths, queries, tiles = self._device.split((n + 1, n, n + 1, self._tiles * 4))
        call = Call(
            tokens=slice(0, tokens),
            tiles=tiles.view(-1, TILE_WORDS),
            begins=begins,
            lengths=lengths,
            queries=queries,
            most_queries=tokens,
            most_keys=self._library.room,
        )
        return self._library.gathered([call], tables)

    def load(self, spans: Sequence[Span]) -> None:
        """Chunks that follow one another and fit."""
        lengths = [span.start + span.count for span in spans]
        places = Places.of([span.row for span in spans], lengths)
        n, m = len(spans), places.tiles.shape[0]
        assert n <= self._most, f"{n} chunks, {self._most} fit"
        assert m <= self._tiles, f"{m} tiles, {self._tiles} fit"
        slot, most = self._upload.slot(), self._most
        begins, own = slot[: most + 1], slot[most + 1 : 2 * most + 1]
        queries, tiles = slot[2 * most + 1 : 3 * most + 2], slot[3 * most + 2 :]
        begins[: n + 1], begins[n + 1 :] = places.begins, places.begins[-1]
        own[:n], own[n:] = lengths, 0
        ends = np.cumsum([spans[0].first, *(span.count for span in spans)])
        queries[: n + 1], queries[n + 1 :] = ends, ends[-1]
        tiles[: places.tiles.size], tiles[places.tiles.size :] = places.tiles.ravel(), -1
        self._upload.send(self._device, slot.size)

    def clear(self) -> None:
        """No chunk."""
        slot = self._upload.slot()
        slot[: 3 * self._most + 2], slot[3 * self._most + 2 :] = 0, -1
        self._upload.send(self._device, slot.size)

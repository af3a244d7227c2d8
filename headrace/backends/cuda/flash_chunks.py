"""Prompt chunks by FlashAttention 3, an optional package of its forward kernels for Hopper.

`fa3-fwd` brings them compiled for bfloat16 and without paged K and V, so those of a step's
sequences are gathered first (`kernels.gather_keys`: at 8,000 tokens 64 MB pass where the attention
computes for a millisecond), then all chunks are one call with lengths. The operator is called as it
is registered with torch: the package's Python takes no memory to write to.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.backends.cuda.chunk_library import SETTING
from headrace.backends.cuda.upload import Upload
from headrace.errors import ConfigError
from headrace.extras import install
from headrace.kernels.dense_prefill import Buffer, Span
from headrace.kernels.gather_keys import (
    BEHIND,
    TILE,
    TILE_WORDS,
    Places,
    gather_keys,
    room_of,
)

MODULE = "fa3_fwd"
LEAST_ROWS = 1024  # queries times heads a KV head: fewer gain less than their gathering costs
BUFFER_BYTES = 128 << 20  # of gathered K and V, unless a step's own tokens are more
_BUFFERS = 4  # that a step fills at most


def unsupported(
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
    find: Callable[[str], object] = find_spec,
) -> str:
    """Why FlashAttention 3 takes no chunk here, with the remedy; "" where it can."""
    if dtype != torch.bfloat16:
        return f"it has no kernel for {dtype}: set dtype to bfloat16"
    if head_dim % 8 or not 64 <= head_dim <= 256:
        return f"it has no kernel for head_dim {head_dim}, only for multiples of 8 from 64 to 256"
    if device.type != "cuda":
        return "no CUDA device"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "its kernels are for compute capability 9.0"
    if find(MODULE) is None:
        return f"it is not installed: {install('flash')}"
    return ""


def load() -> Any:
    """Its operator. Raises ConfigError where the package cannot be imported."""
    try:
        importlib.import_module(f"{MODULE}._C")
        return torch.ops.fa3_fwd.fwd
    except Exception as error:
        raise ConfigError(
            f"{SETTING} = flash: it cannot be imported ({type(error).__name__}: {error}): its "
            "wheel is made for CUDA 13 builds of torch; set it to auto",
            param=SETTING,
        ) from error


@dataclasses.dataclass(frozen=True)
class Call:
    """Chunks that follow one another, whose keys fit the buffer together."""

    tokens: slice
    tiles: Tensor  # [m, 4], see `Places`
    begins: Tensor  # [n + 1], of sequences in the buffer
    lengths: Tensor  # [n]
    queries: Tensor  # [n + 1], of chunks in `tokens`
    most_queries: int
    most_keys: int


class GatheredChunks:
    """The chunks of one step, ready for every layer."""

    def __init__(
        self, calls: Sequence[Call], tables: Tensor, buffer: Buffer, fwd: Any, scale: float
    ) -> None:
        self._calls, self._tables, self._buffer = calls, tables, buffer
        self._fwd, self._scale = fwd, scale

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """See `PlannedChunks`."""
        buffer = self._buffer
        keys, values = buffer.k.transpose(0, 1), buffer.v.transpose(0, 1)
        for call in self._calls:
            gather_keys(k, v, self._tables, call.tiles, buffer.k, buffer.v)
            self._fwd(
                q[call.tokens],
                keys,
                values,
                out=out[call.tokens],
                cu_seqlens_q=call.queries,
                cu_seqlens_k=call.begins,
                seqused_k=call.lengths,
                max_seqlen_q=call.most_queries,
                max_seqlen_k=call.most_keys,
                softmax_scale=self._scale,
                is_causal=True,  # the last query sees the last key
                num_splits=1,
            )


class FlashChunks:
    """Chunks of many queries whose sequence fits the buffer; see `ChunkLibrary`.

    max_tokens: of a step. fwd: the operator; the package's own where None. buffer_bytes: 0 =
    BUFFER_BYTES. Raises ConfigError where the package cannot be imported.
    """

    def __init__(
        self,
        max_tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fwd: Any = None,
        buffer_bytes: int = 0,
    ) -> None:
        self.name = "flash"
        self._fwd = load() if fwd is None else fwd
        self._shape, self._scale = (heads, head_dim), scale
        self._least = -(-LEAST_ROWS * kv_heads // heads)
        fitting = (buffer_bytes or BUFFER_BYTES) // (2 * kv_heads * head_dim * dtype.itemsize)
        self.room = max(room_of(max_tokens), fitting // TILE * TILE)
        self._buffer = Buffer(self.room, kv_heads, head_dim, dtype, device)
        self._most = _BUFFERS * self.room
        words = self._most // TILE * TILE_WORDS + 5 * (max_tokens // self._least + 1)
        self._upload = Upload((words,), device)
        self._plan = torch.zeros(words, dtype=torch.int32, device=device)
        self.ready = False

    def compile(self, cache: Tensor, tables: Tensor) -> None:
        """See `ChunkLibrary`."""
        tiles = self._plan[:TILE_WORDS].view(-1, TILE_WORDS)
        gather_keys(cache, cache, tables, tiles, self._buffer.k, self._buffer.v)

    def prepare(self, k: Tensor, v: Tensor, tables: Tensor) -> str:
        """See `ChunkLibrary`."""
        q = torch.zeros(2, *self._shape, dtype=k.dtype, device=k.device)
        try:
            self._planned([[Span(0, 0, 2, 0)]], tables).attend(q, k, v, torch.empty_like(q))
            if k.device.type == "cuda":
                torch.cuda.synchronize(k.device)
        except Exception as error:
            raise ConfigError(
                f"{SETTING} = flash: its kernel failed to run; set it to cudnn, or mend this: "
                f"{type(error).__name__}: {error}",
                param=SETTING,
            ) from error
        self.ready = True
        return (
            f"FlashAttention 3 for chunks of at least {self._least} tokens in sequences of at most "
            f"{self.room - BEHIND}"
        )

    def plan(
        self, spans: Sequence[Span], tables: Tensor
    ) -> tuple[GatheredChunks | None, list[Span]]:
        """See `ChunkLibrary`. Left are short chunks, sequences that do not fit the buffer, and what
        is more than some buffers full."""
        assert self.ready, "prepare comes first"
        groups: list[list[Span]] = []
        left: list[Span] = []
        in_call = in_all = end = 0
        for span in spans:
            own = room_of(span.start + span.count)
            if span.count < self._least or own > self.room or in_all + own > self._most:
                left.append(span)
                continue
            if not groups or in_call + own > self.room or span.first != end:
                groups.append([])
                in_call = 0
            groups[-1].append(span)
            in_call, in_all, end = in_call + own, in_all + own, span.first + span.count
        return self._planned(groups, tables) if groups else None, left

    def _planned(self, groups: Sequence[Sequence[Span]], tables: Tensor) -> GatheredChunks:
        """One call a group. Their lists go to the device."""
        slot, calls, at = self._upload.slot(), [], 0

        def put(words: npt.NDArray[np.int32]) -> Tensor:
            nonlocal at
            begin, at = at, at + words.size
            slot[begin:at] = words.ravel()
            return self._plan[begin:at]

        for group in groups:
            counts = [span.count for span in group]
            lengths = [span.start + span.count for span in group]
            places = Places.of([span.row for span in group], lengths)
            first = group[0].first
            calls.append(
                Call(
                    tokens=slice(first, first + sum(counts)),
                    tiles=put(places.tiles).view(-1, TILE_WORDS),
                    begins=put(places.begins),
                    lengths=put(np.array(lengths, np.int32)),
                    queries=put(np.cumsum([0, *counts], dtype=np.int32)),
                    most_queries=max(counts),
                    most_keys=max(lengths),
                )
            )
        self._upload.send(self._plan, at)
        return self.gathered(calls, tables)

    def gathered(self, calls: Sequence[Call], tables: Tensor) -> GatheredChunks:
        """Chunks whose lists are on the device, or will be."""
        return GatheredChunks(calls, tables, self._buffer, self._fwd, self._scale)

"""Long chunks with little before them by cuDNN: faster than our kernel, but it wants few shapes.

cuDNN plans a shape anew in 0.1 to 1 s when it first meets it, on the host, so sequences are padded
up to a few sizes that are planned before the server is ready, with as many queries as keys. Keys of
the padding lie after every query, so that causality hides them. Queries that no chunk has, behind
it and for what was computed before it, are whatever lies there; their outputs mean nothing. Where
the output has a row for every token of the step, the step's other tokens are written into it and
nothing is copied. A chunk that no planned size fits is `attention_prefill.prefill`'s.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from headrace.kernels.dense_prefill import Attend, Buffer, Span, cudnn, gather
from headrace.kernels.pdl import INTERPRETED

SIZES = (8192, 7168, 6144, 5120, 4096, 3072)  # shorter chunks gain nothing: a wave of ours is full
PADDING = 1024  # tokens before and behind a step's that `q` has memory for
_WASTE = 1.25  # most work of a padded square over the chunk's own: what cuDNN gains, nearly


def unsupported(dtype: torch.dtype, head_dim: int, device: torch.device) -> str:
    """Why cuDNN takes no chunk here; "" where it does."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is not for cuDNN's attention"
    if head_dim % 8 or head_dim > 128:
        return f"head_dim {head_dim} is not for cuDNN's attention"
    if INTERPRETED or device.type != "cuda":
        return "no CUDA device"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "older than compute capability 9.0: cuDNN gains nothing"
    if not torch.backends.cudnn.is_available():
        return "torch has no cuDNN"
    return ""


class DenseChunks:
    """Which chunks cuDNN takes, and memory for their K and V.

    `sizes` are planned by `prepare`; before it, and in other threads than its, no chunk is taken:
    cuDNN keeps its plans per thread.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
        attend: Attend = cudnn,
    ) -> None:
        assert sizes, "no size to prepare"
        self.sizes = tuple(sorted(sizes))
        self._queries = (heads, head_dim)
        self._scale, self._attend = scale, attend
        self._buffer = Buffer(self.sizes[-1], kv_heads, head_dim, dtype, device)
        self._thread: int | None = None

    def compile(self, cache: Tensor, tables: Tensor) -> None:
        """Launch our kernel that gathers, for `kernels.launch.compiling`. cache: K of any layer."""
        buffer = self._buffer
        gather(cache, cache, tables, 0, 1, buffer.k, buffer.v, padded=self.sizes[0])

    def prepare(self, k: Tensor, v: Tensor, tables: Tensor) -> None:
        """Plan every size: seconds. Call in the thread that launches steps, before the first.

        k, v: the cache of any layer; row 0 of tables is read.
        """
        buffer_k, buffer_v = self._buffer.k, self._buffer.v
        q = torch.zeros(self.sizes[-1], *self._queries, dtype=k.dtype, device=k.device)
        for size in self.sizes:
            gather(k, v, tables, 0, 1, buffer_k, buffer_v, padded=size)
            self._run(q, size)
        self._thread = threading.get_ident()

    def fitting(self, start: int, count: int, first: int) -> int:
        """The size that a chunk's sequence is padded to; 0: none, the paged kernel takes it.

        first: the chunk's first token in the step. Queries before it stand for [0, start).
        """
        if start > first + PADDING or threading.get_ident() != self._thread:
            return 0
        total = start + count
        for size in self.sizes:
            if total <= size:
                worth = size**2 <= _WASTE * (total**2 - start**2) and size - total <= PADDING
                return size if worth else 0
        return 0

    def attend(
        self, span: Span, size: int, q: Tensor, k: Tensor, v: Tensor, tables: Tensor
    ) -> Tensor:
        """A chunk over its sequence so far -> [size, heads, d], new.

        Row i is the step's token span.first - span.start + i; rows of others mean nothing.

        q [T, heads, d], in memory that goes on for PADDING rows at both ends; k, v [blocks,
        kv_heads, block_size, d]; tables [rows, width].
        """
        total = span.start + span.count
        gather(k, v, tables, span.row, total, self._buffer.k, self._buffer.v, padded=size)
        begin = q.storage_offset() + (span.first - span.start) * q.stride(0)
        queries = q.as_strided((size, *q.shape[1:]), q.stride(), begin)
        return self._run(queries, size)

    def _run(self, q: Tensor, size: int) -> Tensor:
        """q [>= size, heads, d] over the buffer -> [size, heads, d]."""
        keys, values = (x[None, :, :size] for x in (self._buffer.k, self._buffer.v))
        queries = q[:size].transpose(0, 1)[None]
        return self._attend(queries, keys, values, True, self._scale)[0][0].transpose(0, 1)

"""What a library that takes chunks of prompts gives: one suite runs against every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headrace.kernels.dense_prefill import Span

SETTING = "prefill_attention"


class PlannedChunks(Protocol):
    """The chunks of one step, ready for every layer."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """q, out [T, heads, d] of the whole step; k, v [blocks, kv_heads, block_size, d], a
        layer's cache, where the step's own are already. Rows of `out` of other tokens stay."""


class ChunkLibrary(Protocol):
    """Chunks of steps that are launched call by call, each query over all keys up to its own. A
    captured graph has a library's chunks where `flash_table` gives them memory of a fixed place."""

    @property
    def name(self) -> str:
        """The choice's, in /metrics."""

    @property
    def ready(self) -> bool:
        """`prepare` was called: chunks may come."""

    def compile(self, cache: Tensor, tables: Tensor) -> None:
        """Launch those of our kernels that it needs, for `kernels.launch.compiling`.

        cache: K of any layer.
        """

    def prepare(self, k: Tensor, v: Tensor, tables: Tensor) -> str:
        """Make its kernels ready and try them -> which they are, for people.

        k, v: the cache of any layer; row 0 of tables is read. Raises ConfigError with what the
        library said where it fails.
        """

    def plan(
        self, spans: Sequence[Span], tables: Tensor
    ) -> tuple[PlannedChunks | None, list[Span]]:
        """Queue the plan of a step whose chunks are `spans`, in the order of their tokens -> those
        that it takes, if any, and the spans that it leaves to others, in order.

        tables [rows, width] int32, on the device; contiguous. No host synchronisation. Needs:
        `ready`.
        """

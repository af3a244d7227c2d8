"""Rows whose logits are not the model's any more: rules, penalties, masks and top_n_sigma, written
into float32 rows of their own that `sampling.sample` then draws from.

Launches: 2, and 2 more where a row uses top_n_sigma without a small top_k. Rules and penalties
touch only the ids that a list or the sequence names; what is read whole is one row of logits, once.
A changed logit is computed in float64 and rounded to float32 after each penalty, so it is within
2^-24 of its size a penalty; `sampling.sample` promises the same of these logits as of any others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.edit import edit_kernel
from headrace.kernels.edit_params import EDIT_WIDTH
from headrace.kernels.launch import launch
from headrace.kernels.sigma import moments_kernel, sigma_kernel
from headrace.kernels.widen import widen_kernel

_POSITIONS = 1024  # of a sequence that a program looks at together


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the device knows of its rows, int32."""

    edits: Tensor  # [rows, EDIT_WIDTH], see `edit_params.pack_edits`
    arena: Tensor  # [n]: their lists
    tables: Tensor  # [rows, width]: block ids
    slots: Tensor  # [blocks, block_size]: the id of each slot of the KV cache


@dataclasses.dataclass(frozen=True)
class Draws:
    """Columns of some draws, int32, an entry each; mask_slots -1: no mask."""

    sources: Tensor  # row of the model's logits
    tokens: Tensor  # token of the step, whose position is the last of the sequence
    rows: Tensor  # device row
    mask_slots: Tensor


@dataclasses.dataclass(frozen=True)
class Wide:
    """Memory for `rows` edited rows: 8 bytes a logit.

    marks are zero between calls, and broken.
    """

    logits: Tensor  # [rows, vocab] float32
    marks: Tensor  # [rows, vocab] int32
    broken: Tensor  # [rows] int32
    moments: Tensor  # [rows, chunks, 4] float64
    places: Tensor  # [rows, 2, positions] int32
    chunk: int
    positions: int

    @classmethod
    def allocate(
        cls,
        rows: int,
        vocab: int,
        device: torch.device,
        *,
        chunk: int = 4096,
        positions: int = _POSITIONS,
    ) -> Wide:
        """chunk, positions: powers of two."""
        chunks = triton.cdiv(vocab, chunk)
        return cls(
            torch.empty((rows, vocab), dtype=torch.float32, device=device),
            torch.zeros((rows, vocab), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.empty((rows, chunks, 4), dtype=torch.float64, device=device),
            torch.empty((rows, 2, positions), dtype=torch.int32, device=device),
            chunk,
            positions,
        )

    @property
    def size_bytes(self) -> int:
        """All of it."""
        parts = (self.logits, self.marks, self.broken, self.moments, self.places)
        return sum(part.numel() * part.element_size() for part in parts)


def edit(
    logits: Tensor,
    masks: Tensor,
    positions: Tensor,
    draws: Draws,
    rows: Rows,
    wide: Wide,
    *,
    sigma: bool,
    with_pdl: bool = False,
) -> None:
    """wide.logits[j] = what draw j draws from: everything that comes before temperature, and, if
    `sigma`, top_n_sigma of rows whose tokens are not few (of the others `few_kernel` does it).

    logits [R, vocab] contiguous; masks [m, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 is
    token t; positions [T] int32.
    """
    count, vocab = draws.rows.shape[0], logits.shape[1]
    assert count <= wide.logits.shape[0], f"{count} draws, room for {wide.logits.shape[0]}"
    assert logits.is_contiguous(), "logits must be contiguous"
    assert masks.is_contiguous(), "masks must be contiguous"
    assert masks.shape[1] == -(-vocab // 32), "a mask has a bit for each token"
    assert rows.edits.shape[1] == EDIT_WIDTH, f"edits is [rows, {EDIT_WIDTH}]"
    assert wide.logits.shape[1] == vocab, "wide rows are for another vocabulary"
    if not count:
        return
    chunks = triton.cdiv(vocab, wide.chunk)
    options: dict[str, Any] = {"VOCAB": vocab, **pdl.options(with_pdl)}
    launch(widen_kernel, (chunks, count),
        logits, draws.sources, rows.edits, draws.rows, masks, draws.mask_slots,
        wide.logits, wide.broken, CHUNK=wide.chunk, num_warps=8, **options,
    )  # fmt: skip
    launch(edit_kernel, (count,),
        logits, draws.sources, rows.edits, rows.arena, masks, draws.mask_slots,
        positions, draws.tokens, draws.rows, rows.slots, rows.tables, rows.tables.shape[1],
        wide.logits, wide.broken, wide.marks, wide.places,
        BLOCK=rows.slots.shape[1], N=wide.positions, num_warps=8, maxnreg=128, **options,
    )  # fmt: skip
    if sigma:
        options["CHUNKS"] = chunks
        launch(moments_kernel, (chunks, count),
            wide.logits, rows.edits, draws.rows, wide.moments,
            CHUNK=wide.chunk, num_warps=8, **options,
        )  # fmt: skip
        launch(sigma_kernel, (chunks, count),
            wide.logits, rows.edits, draws.rows, wide.moments,
            CHUNKS_PADDED=triton.next_power_of_2(chunks), CHUNK=wide.chunk, num_warps=8, **options,
        )  # fmt: skip

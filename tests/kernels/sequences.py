"""Sequences of ids in the slots of a paged cache, and rows of sampling parameters over them."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.draw_params import pack
from headrace.kernels.edit_params import EDIT_WIDTH, lists_of, pack_edits
from headrace.kernels.edited import Draws, Rows, Wide
from headrace.kernels.edited import edit as edit_rows
from headrace.messages import Sampling

BLOCK = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """One draw: what it is asked, and the sequence that it goes on."""

    sampling: Sampling
    ids: list[int]
    prompt_tokens: int
    mask: list[int] | None = None  # ids that may be drawn


@dataclasses.dataclass(frozen=True)
class Table:
    """Everything on the device that draws of these rows need. Draw j: device row 2 j + 1, token
    and row of logits D - 1 - j, so that no index can be mixed up."""

    rows: Rows
    draws: Draws
    positions: Tensor
    masks: Tensor
    params: Tensor

    @classmethod
    def of(cls, rows: list[Row], vocab: int, device: torch.device) -> Table:
        count, words = len(rows), -(-vocab // 32)
        width = 1 + max(len(row.ids) for row in rows) // BLOCK
        free = list(range(count * width + 3))
        random.Random(1).shuffle(free)
        slots = torch.full((len(free), BLOCK), -7, dtype=torch.int32)
        tables = torch.zeros((2 * count + 1, width), dtype=torch.int32)
        edits = torch.full((2 * count + 1, EDIT_WIDTH), -9, dtype=torch.int32)
        params = torch.full((2 * count + 1, 8), -1, dtype=torch.int32)
        arena = [-5, -5]
        masks = np.zeros((count, words), np.int32)
        mask_slots = [-1] * count
        for j, row in enumerate(rows):
            at, mine = 2 * j + 1, [free.pop() for _ in range(width)]
            tables[at] = torch.tensor(mine)
            for i, token in enumerate(row.ids):
                slots[mine[i // BLOCK], i % BLOCK] = token
            packed = pack_edits(row.sampling, row.prompt_tokens, len(arena))
            edits[at] = torch.tensor(packed, dtype=torch.int32)
            params[at] = torch.tensor(pack(row.sampling, j), dtype=torch.int32)
            arena += lists_of(row.sampling)
            if row.mask is not None:
                mask_slots[j] = count - 1 - j
                bits = np.zeros(words * 32, np.bool_)
                bits[row.mask] = True
                masks[count - 1 - j] = np.packbits(bits, bitorder="little").view(np.int32)
        order = list(range(count - 1, -1, -1))
        last_places = [len(rows[j].ids) - 1 for j in order]

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            Rows(edits.to(device), column(arena), tables.to(device), slots.to(device)),
            Draws(
                column(order), column(order), column([2 * j + 1 for j in range(count)]),
                column(mask_slots),
            ),
            column(last_places),
            torch.from_numpy(masks).to(device),
            params.to(device),
        )  # fmt: skip

    def edit(self, logits: Tensor, wide: Wide, *, sigma: bool, with_pdl: bool = False) -> None:
        """logits [D, vocab]: row j is draw j's."""
        flipped = logits.flip(0).contiguous()
        edit_rows(
            flipped, self.masks, self.positions, self.draws, self.rows, wide,
            sigma=sigma, with_pdl=with_pdl,
        )  # fmt: skip

"""K and V of several sequences out of the paged cache, one behind the other, for kernels that want
them dense.

Behind each sequence lie zeros: a kernel that loads whole tiles of keys multiplies by zero what it
masks, and zero times what another sequence left there need not be zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launch import launch
from headrace.kernels.shapes import power_of_two

TILE = 64  # positions that a program copies
BEHIND = 191  # zeros behind a sequence at least: no tile of keys is longer than that and one
TILE_WORDS = 4


def room_of(length: int) -> int:
    """Positions of the target that a sequence of `length` takes."""
    return -(-(length + BEHIND) // TILE) * TILE


@dataclasses.dataclass(frozen=True)
class Places:
    """Where sequences go: sequence i is positions [0, lengths[i]) of device row rows[i], and fills
    [begins[i], begins[i] + room_of(lengths[i])) of the target.

    tiles [m, TILE_WORDS] int32: (row, first position, its place in the target, length). A tile of
    row -1 is padding: a captured graph has as many programs at each replay.
    """

    begins: npt.NDArray[np.int32]  # [n + 1], the last one is the end of all
    tiles: npt.NDArray[np.int32]

    @classmethod
    def of(cls, rows: Sequence[int], lengths: Sequence[int]) -> Places:
        """One behind the other, from 0 on. Lengths are >= 1."""
        own = np.array(lengths, np.int32)
        assert (own > 0).all(), "a sequence has at least one token"
        tiles_each = -(-(own + BEHIND) // TILE)
        ends = np.cumsum(tiles_each)
        tile = np.arange(ends[-1]) - np.repeat(ends - tiles_each, tiles_each)
        tiles = np.stack(
            (
                np.repeat(np.array(rows, np.int32), tiles_each),
                tile * TILE,
                np.arange(ends[-1]) * TILE,
                np.repeat(own, tiles_each),
            ),
            1,
        )
        begins = np.concatenate(([0], ends * TILE))
        return cls(begins.astype(np.int32), tiles.astype(np.int32))


@triton.jit(
    do_not_specialize=["width", "capacity"],
    do_not_specialize_on_alignment=["tables", "tiles"],
)
def _gather_keys_kernel(
    k,  # [blocks, KV_HEADS, PAGE, D], contiguous
    v,
    tables,  # [rows, width]
    tiles,  # Places.tiles
    out_k,  # [KV_HEADS, capacity, D]
    out_v,
    width,
    capacity,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
):
    kv_head = tl.program_id(0) % KV_HEADS
    words = tiles + tl.program_id(0) // KV_HEADS * WORDS
    row, begin = tl.load(words), tl.load(words + 1)
    if row < 0:
        return
    target, length = tl.load(words + 2), tl.load(words + 3)
    t = tl.arange(0, TILE)
    d = tl.arange(0, D_PAD)
    position = begin + t
    table = tables + row.to(tl.int64) * width
    block = tl.load(table + position // PAGE, mask=position < length, other=0).to(tl.int64)
    line = block * (KV_HEADS * PAGE * D) + (kv_head * (PAGE * D) + position % PAGE * D)
    inside = (position < length)[:, None] & (d < D)[None, :]
    source = line[:, None] + d[None, :]
    place = (kv_head * capacity.to(tl.int64) + target + t)[:, None] * D + d[None, :]
    written = (t < TILE)[:, None] & (d < D)[None, :]
    tl.store(out_k + place, tl.load(k + source, mask=inside, other=0.0), mask=written)
    tl.store(out_v + place, tl.load(v + source, mask=inside, other=0.0), mask=written)


def gather_keys(
    k: Tensor, v: Tensor, tables: Tensor, tiles: Tensor, out_k: Tensor, out_v: Tensor
) -> None:
    """Copy sequences to their `Places`, and zeros behind each.

    k, v [blocks, kv_heads, block_size, d]; tables [rows, width]; tiles [m, 4] int32, of
    `Places` and on the device; out_k, out_v [kv_heads, capacity, d], contiguous, with room for
    all. No host synchronisation.
    """
    _, kv_heads, page, d = k.shape
    assert out_k.is_contiguous(), "out layout"
    assert out_v.is_contiguous(), "out layout"
    assert out_k.shape == out_v.shape == (kv_heads, out_k.shape[1], d), (out_k.shape, out_v.shape)
    assert tiles.shape[0] * TILE <= out_k.shape[1], (tiles.shape, out_k.shape)
    assert tiles.dtype == torch.int32, tiles.dtype
    launch(
        _gather_keys_kernel,
        (tiles.shape[0] * kv_heads,),
        k,
        v,
        tables,
        tiles,
        out_k,
        out_v,
        tables.shape[1],
        out_k.shape[1],
        KV_HEADS=kv_heads,
        PAGE=page,
        D=d,
        D_PAD=power_of_two(d),
        TILE=TILE,
        WORDS=TILE_WORDS,
    )


def gather_keys_reference(
    cache: Tensor, tables: Tensor, rows: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """-> [kv_heads, positions of all, d], zeros included."""
    page, pieces = cache.shape[2], []
    for row, length in zip(rows, lengths, strict=True):
        position = torch.arange(length, device=cache.device)
        own = cache[tables[row].long()[position // page], :, position % page].transpose(0, 1)
        behind = room_of(length) - length
        pieces.append(torch.nn.functional.pad(own, (0, 0, 0, behind)))
    return torch.cat(pieces, 1)

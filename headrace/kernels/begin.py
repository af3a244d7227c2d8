"""The first kernel of a step: positions move on, ids are settled, embeddings are read, scaled where
that is asked for, with a learned row for the position added where there are such."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.columns import COLUMNS, StepColumns
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output


@triton.jit(
    do_not_specialize=["spare", "width", "scale", "known"],
    do_not_specialize_on_alignment=["ids", "last", *COLUMNS],
)
def begin_kernel(
    ids,
    last,
    rows,
    positions,
    writes,
    tables,
    width,
    slots,
    embedding,
    learned,
    x,
    kept,
    spare,
    scale,
    known,
    SCALED: tl.constexpr,
    LEARNED: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens,): one program owns the entries of a token."""
    pdl.release(PDL)
    token = tl.program_id(0)
    k = tl.arange(0, BK)
    pdl.wait(PDL)
    row = tl.load(rows + token)
    given = tl.load(ids + token)
    drawn = tl.load(last + row)
    position = tl.load(positions + token)
    tl.debug_barrier()  # every thread has read before one of them writes
    tl.store(positions + token, tl.where(row == spare, 0, position + 1))
    tl.store(ids + token, -1)
    settled = tl.where(given < 0, drawn, given)
    if KEPT:
        tl.store(kept + token, settled)
    if tl.load(writes + token) != 0:
        block = tl.load(tables + row.to(tl.int64) * width + (position + 1) // BLOCK)
        tl.store(slots + block.to(tl.int64) * BLOCK + (position + 1) % BLOCK, settled)
    source = settled.to(tl.int64) * K
    y = tl.load(embedding + source + k, mask=k < K, other=0.0)
    if SCALED:
        y = (y.to(tl.float32) * scale).to(x.dtype.element_ty)
    if LEARNED:
        place = tl.minimum(tl.where(row == spare, 0, position + 1), known - 1).to(tl.int64) * K
        more = tl.load(learned + place + k, mask=k < K, other=0.0)
        y = (y.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(x + token.to(tl.int64) * K + k, y, mask=k < K)


@functools.cache
def _rounded(factor: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(factor, dtype=dtype))


def begin(
    ids: Tensor,
    last: Tensor,
    embedding: Tensor,
    columns: StepColumns,
    slots: Tensor,
    x: Tensor,
    *,
    scale: float = 1.0,
    learned: Tensor | None = None,
    kept: Tensor | None = None,
    with_pdl: bool = False,
) -> None:
    """x[t] = scale * embedding[id of token t] + learned[its position]; positions[t] += 1;
    ids[t] = -1.

    The factor is rounded to the dtype, and so is the product. A position that `learned` [P, K] has
    no row for takes its last: a step that ran past the end of a sequence is dropped.

    The id is ids[t], or, where that is negative, last[rows[t]]: the row's newest draw. So a host
    that says nothing gets the next decode step: it writes ids and positions (its first less one)
    only where a row begins. Padding (the last row of `tables`) stays at position 0.
    slots[block, place] = the id, where the token's K and V are written to: later draws find the
    sequence there.

    ids [T], last [rows], slots [blocks, block_size] int32; embedding [V, K]; x [T, K] is written,
    and so is kept [T] int32, the ids, where it is given.
    """
    tokens, k = x.shape
    check_output(x, (tokens, embedding.shape[1]))
    assert embedding.is_contiguous(), "embedding: rows lie one after another"
    assert ids.shape == columns.rows.shape == columns.positions.shape == (tokens,), "a token each"
    assert last.shape[0] == columns.tables.shape[0], "last has an entry a row, the spare one too"
    if tokens == 0:
        return
    assert learned is None or learned.shape[1] == k, "learned is [P, K]"
    assert kept is None or kept.shape == (tokens,), "kept has an entry a token"
    block = triton.next_power_of_2(k)
    launch(begin_kernel, (tokens,),
        ids, last, columns.rows, columns.positions, columns.writes,
        columns.tables, columns.tables.shape[1], slots, embedding,
        embedding if learned is None else learned, x, ids if kept is None else kept,
        columns.tables.shape[0] - 1,
        _rounded(scale, x.dtype), 0 if learned is None else learned.shape[0],
        SCALED=scale != 1.0, LEARNED=learned is not None, KEPT=kept is not None,
        BLOCK=slots.shape[1], K=k, BK=block, num_warps=min(8, max(1, block // 512)),
        **pdl.options(with_pdl),
    )  # fmt: skip


def begin_reference(
    ids: Tensor,
    last: Tensor,
    embedding: Tensor,
    columns: StepColumns,
    slots: Tensor,
    x: Tensor,
    *,
    scale: float = 1.0,
    learned: Tensor | None = None,
    kept: Tensor | None = None,
) -> None:
    """The same with torch."""
    spare = columns.tables.shape[0] - 1
    rows = columns.rows.long()
    settled = ids.where(ids >= 0, last[rows]).long()
    if kept is not None:
        kept.copy_(settled)
    x.copy_(embedding[settled] * torch.tensor(scale, dtype=x.dtype, device=x.device))
    columns.positions.copy_((columns.positions + 1).where(rows != spare, 0))
    if learned is not None:
        x += learned[columns.positions.long().clamp(max=learned.shape[0] - 1)]
    ids.fill_(-1)
    written = columns.writes != 0
    places = columns.positions[written].long()
    blocks = columns.tables[rows[written], places // slots.shape[1]].long()
    slots[blocks, places % slots.shape[1]] = settled[written].int()

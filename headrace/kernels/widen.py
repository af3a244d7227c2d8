"""Model logits of some draws, as float32 that the stages before a draw may write to.

Plain reference: the masks of `sampling.pipeline`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import pdl
from headrace.kernels.edit_params import ALLOWED, WIDTH
from headrace.kernels.weights import COLUMNS, NEG_INF


@triton.jit
def open_bit(masks, slot, ids, inside, WORDS: tl.constexpr):
    """Whether the mask in `slot` lets these ids be drawn; slot < 0 is no mask."""
    word = tl.load(
        masks + slot.to(tl.int64) * WORDS + (ids >> 5), mask=inside & (slot >= 0), other=-1
    )
    return ((word >> (ids & 31)) & 1) != 0


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def widen_kernel(
    logits,
    sources,
    edits,
    draw_rows,
    masks,
    mask_slots,
    wide,
    broken,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, draws). wide [draws, VOCAB] float32: the logits of row sources[draw], -inf
    where the mask is 0, or everywhere in a row of `allowed` ids, which `edit` copies.

    broken[draw] = 1 where the model's logits hold NaN or +inf.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    source = logits + tl.load(sources + draw).to(tl.int64) * VOCAB
    z = tl.load(source + ids, mask=inside, other=NEG_INF).to(tl.float32)
    if tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0) > 0:
        tl.store(broken + draw, 1)
    slot = tl.load(mask_slots + draw)
    listed = tl.load(edits + tl.load(draw_rows + draw) * WIDTH + ALLOWED) > 0
    if listed:
        z = tl.full((CHUNK,), NEG_INF, tl.float32)
    elif slot >= 0:
        open_ = open_bit(masks, slot, ids, inside, (VOCAB + 31) // 32)
        z = tl.where(open_, z, NEG_INF)
    tl.store(wide + draw.to(tl.int64) * VOCAB + ids, z, mask=inside)

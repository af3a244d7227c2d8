"""bfloat16 matrices in 12 bits a number, exactly.

Numbers of a matrix, trained or drawn, have few of the 256 exponents of a bfloat16: of those of a
normal distribution all but one in ten thousand have 16 that are neighbours. So a number is a byte,
its sign and the 7 bits of its mantissa, and half a byte, its exponent above the matrix's `base`.
Numbers of other exponents escape: their places and values are listed, and in their places stands
the power of two that has the exponent `base`, which whoever multiplies takes off again. Exponents
are meant as they are stored: 127 is that of 1. (Codes of varying length need less, but more to
read: https://arxiv.org/abs/2504.11651. These are undone while a kernel waits for the memory.)

A matrix lies in blocks of 64 rows and 128 columns, one after another in the order in which they are
read: 12 KiB in three parts of [64, 64] bytes, the bytes of columns 0..63, those of columns 64..127,
and the half bytes of both, the latter's shifted by four.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch

ROWS, COLUMNS = 64, 128  # of a block
SLOTS = 16  # escapes of a group of ROWS rows that are found without a search
EXPONENTS = 16  # that half a byte tells apart
MOST_ESCAPES = 1 / 2000  # of all numbers: with more, reading them takes what the others gain
_UNEVEN = 4  # times that share of one group's: 16, a search, for each block that is read
_BIAS = 127  # of exponents as they are stored, here as in float32
_ONE = 96  # the exponent that the half byte 0 stands for while a matrix is multiplied: 2^-31
_SAMPLED_ROWS = 16  # about so many of a matrix, from which its base is chosen
# Numbers that are compressed at once. What is taken for them meanwhile, a byte each, is far smaller
# than what stays: else that would be cut from it, and holes would be left in the memory.
_AT_ONCE = 1 << 25


@dataclasses.dataclass(frozen=True, slots=True)
class Compressed:
    """Matrices [E, R, K]: R a multiple of 64, K of 128; G = R / 64 groups of rows each.

    blocks [E, G, K / 128, 3, 64, 64] uint8: see above;
    scales [E] float32: 2^(base - 96), by which sums of what `numbers` yields are multiplied;
    slots [E * G, 16] int32: the first escapes of a group, row * K + column inside the group, in
    ascending order, -1: none; slot_values [E * G, 16] bfloat16: their values;
    starts [E * G + 1] int32: where the other escapes of each group begin in
    places [n] int32 and values [n] bfloat16, which are as `slots` and `slot_values`.
    """

    blocks: Tensor
    scales: Tensor
    slots: Tensor
    slot_values: Tensor
    starts: Tensor
    places: Tensor
    values: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, R, K)."""
        experts, groups, turns = self.blocks.shape[:3]
        return experts, groups * ROWS, turns * COLUMNS

    @property
    def size_bytes(self) -> int:
        """All of it."""
        held = (getattr(self, field.name) for field in dataclasses.fields(self))
        return sum(t.numel() * t.element_size() for t in held)


def compressible(rows: int, columns: int) -> bool:
    """Whether matrices of this shape fall into blocks."""
    return rows % ROWS == 0 and columns % COLUMNS == 0


def size_bytes(numbers: int) -> int:
    """Of so many numbers, compressed; escapes and scales add about a hundredth at most."""
    return numbers * 3 // 2


def compress(
    weight: Tensor, *, paired: bool = False, most_escapes: float = MOST_ESCAPES
) -> Compressed | None:
    """weight [E, R, K] bfloat16, contiguous -> the same numbers; None: more than `most_escapes` of
    all, or _UNEVEN times as many of one group's, would escape.

    paired: rows i and i + R / 2 become rows 2 i and 2 i + 1. Waits for the device. Raises
    torch.OutOfMemoryError.
    """
    experts, rows, columns = weight.shape
    assert weight.dtype == torch.bfloat16, f"{weight.dtype}: only bfloat16 has these bits"
    assert weight.is_contiguous(), "weight: matrices lie one after another"
    assert compressible(rows, columns), f"{rows} x {columns} is no number of whole blocks"
    groups, turns, device = rows // ROWS, columns // COLUMNS, weight.device
    shape = (experts, groups, turns, 3, ROWS, COLUMNS // 2)
    blocks = torch.empty(shape, dtype=torch.uint8, device=device)
    bases, at_once = _bases(weight), max(1, _AT_ONCE // (rows * columns))
    found, left = [], int(weight.numel() * most_escapes)
    for first in range(0, experts, at_once):
        own = slice(first, first + at_once)
        escaped = torch.empty_like(weight[own], dtype=torch.uint8)
        launch(compress_kernel, (escaped.shape[0] * groups, turns),
            weight[own].view(torch.int16), bases[own], blocks[own], escaped,
            GROUPS=groups, K=columns, PAIRED=paired,
        )  # fmt: skip
        found.append(escaped.view(-1).nonzero()[:, 0] + first * rows * columns)
        left -= found[-1].numel()
        if left < 0:  # before all places, eight bytes each, fill the memory
            return None
    at = torch.cat(found)
    row, of_group = at // columns % rows, ROWS * columns
    source = row // 2 + row % 2 * (rows // 2) if paired else row
    values = weight.view(-1)[at + (source - row) * columns]
    group, place = at // of_group, (at % of_group).to(torch.int32)
    counts = torch.bincount(group, minlength=experts * groups)
    if int(counts.max()) > of_group * most_escapes * _UNEVEN:
        return None
    rank = torch.arange(at.numel(), device=device) - (counts.cumsum(0) - counts)[group]
    slots = torch.full((experts * groups, SLOTS), -1, dtype=torch.int32, device=device)
    slot_values = torch.zeros((experts * groups, SLOTS), dtype=weight.dtype, device=device)
    early = rank < SLOTS
    slots[group[early], rank[early]] = place[early]
    slot_values[group[early], rank[early]] = values[early]
    starts = torch.zeros(experts * groups + 1, dtype=torch.int32, device=device)
    starts[1:] = (counts - SLOTS).clamp(min=0).cumsum(0)
    scales = ((bases - _ONE + _BIAS) << 23).to(torch.int32).view(torch.float32)  # exact
    return Compressed(blocks, scales, slots, slot_values, starts, place[~early], values[~early])


def _bases(weight: Tensor) -> Tensor:
    """[E] int64: the least of the 16 exponents that most of some rows of each matrix have. From 1,
    for 0 is that of zero; to 208, so that every scale is a float32."""
    experts, rows, _ = weight.shape
    sampled = weight[:, :: max(1, rows // _SAMPLED_ROWS)].reshape(experts, -1).view(torch.int16)
    exponents = ((sampled >> 7) & 255).long()
    counts = torch.zeros((experts, 256), dtype=torch.int32, device=weight.device)
    counts.scatter_add_(1, exponents, counts.new_ones(1).expand_as(exponents))
    below = counts.cumsum(1)
    held = below[:, EXPONENTS:224] - below[:, : 224 - EXPONENTS]  # of bases 1, 2, ...
    return held.argmax(1) + 1


@triton.jit
def compress_kernel(
    weight,
    bases,
    blocks,
    escaped,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    PAIRED: tl.constexpr,
) -> None:
    """Grid (matrices * groups, K / 128): a block each. weight: as int16; escaped: 1 where a number
    of the rows in their new order does."""
    own, turn = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = tl.load(bases + own // GROUPS).to(tl.int32)
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    at = (own * 64 + row) * K + turn * 128 + column
    source = at
    if PAIRED:
        new = own % GROUPS * 64 + row
        source += (new // 2 + new % 2 * (GROUPS * 32) - new) * K
    first, half = _code(weight + source, escaped + at, base)
    second, second_half = _code(weight + source + 64, escaped + at + 64, base)
    place = blocks + (own * (K // 128) + turn) * (3 * 64 * 64) + row * 64 + column
    tl.store(place, first.to(tl.uint8))
    tl.store(place + 64 * 64, second.to(tl.uint8))
    tl.store(place + 2 * 64 * 64, (half | (second_half << 4)).to(tl.uint8))


@triton.jit
def _code(weight_at, escaped_at, base):
    """-> the bytes and half bytes of the numbers there."""
    bits = tl.load(weight_at).to(tl.int32)
    above = ((bits >> 7) & 255) - base
    out = (above < 0) | (above > 15)
    tl.store(escaped_at, out.to(tl.uint8))
    return tl.where(out, 0, ((bits >> 8) & 128) | (bits & 127)), tl.where(out, 0, above)


def restore(compressed: Compressed) -> Tensor:
    """[E, R, K] bfloat16: the matrices, bit for bit. The plain reference."""
    experts, rows, columns = compressed.shape
    blocks = compressed.blocks.to(torch.int32)
    above = torch.stack([blocks[:, :, :, 2] & 15, blocks[:, :, :, 2] >> 4], dim=3)
    bases = (compressed.scales.view(torch.int32) >> 23) - _BIAS + _ONE
    exponents = above + bases.view(-1, 1, 1, 1, 1, 1)
    low = blocks[:, :, :, :2]
    bits = ((low & 128) << 8) | (exponents << 7) | (low & 127)
    bits = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)
    weight = bits.permute(0, 1, 4, 2, 3, 5).reshape(-1, ROWS * columns).view(torch.bfloat16)
    group, slot = (compressed.slots >= 0).nonzero(as_tuple=True)
    weight[group, compressed.slots[group, slot].long()] = compressed.slot_values[group, slot]
    counts = compressed.starts.diff()
    group = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    weight[group, compressed.places.long()] = compressed.values
    return weight.view(experts, rows, columns)


def _two(source: str, bytes_of: str, shift: int, out: str) -> str:
    """Assembly that makes two numbers: their bytes, each twice in 16 bits, keep sign and mantissa,
    and the half bytes, of the two in `pair`, go between these."""
    return f"""prmt.b32 byte, {source}, 0, {bytes_of};
shl.b32 half, pair, {shift};
lop3.b32 half, half, 0x07800780, 0x30003000, 0xEA;
lop3.b32 {out}, byte, 0x807F807F, half, 0xEA;
"""


# A 32-bit register holds four bytes: $4 of `first`, $5 of `second`, $6 their half bytes.
_UNPACK = tl.constexpr(
    "\n{\n.reg .b32 byte, half, pair;\nprmt.b32 pair, $6, 0, 0x4140;\n"
    + _two("$4", "0x1100", 7, "$0")
    + _two("$5", "0x1100", 3, "$2")
    + "prmt.b32 pair, $6, 0, 0x4342;\n"
    + _two("$4", "0x3322", 7, "$1")
    + _two("$5", "0x3322", 3, "$3")
    + "}\n"
)
_BY_WORDS = tl.constexpr(not pdl.INTERPRETED)  # the interpreter knows no assembly


@triton.jit
def numbers(first, second, halves, dtype: tl.constexpr):
    """Bytes of numbers, and the half bytes of both -> the numbers, with exponents from 96 on in
    place of the matrix's base."""
    if _BY_WORDS:
        one, other = tl.inline_asm_elementwise(
            _UNPACK,
            "=r,=r,=r,=r,r,r,r",
            [first, second, halves],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return one.to(dtype), other.to(dtype)
    else:
        return _number(first, halves & 15, dtype), _number(second, halves >> 4, dtype)


@triton.jit
def _number(byte, half, dtype: tl.constexpr):
    wide = byte.to(tl.uint32)
    bits = ((wide & 128) << 8) | (wide & 127) | ((half.to(tl.uint32) + 96) << 7)
    return (bits << 16).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def compressed_sums(
    x_at,  # [BM] rows of x [.., K]
    live,  # [BM]
    blocks,
    scales,
    slots,
    slot_values,
    starts,
    places,
    values,
    expert,
    group,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
):
    """Products with the rows of one group of the expert's matrix: [BM, 64] float32."""
    PART: tl.constexpr = 64 * 64  # bytes
    own = expert * GROUPS + group
    scale = tl.load(scales + expert)
    slot = tl.arange(0, 16)
    place = tl.load(slots + own * 16 + slot)  # early: what follows needs time
    value = tl.load(slot_values + own * 16 + slot)
    begin, end = tl.load(starts + own), tl.load(starts + own + 1)
    column, row = tl.arange(0, 64), tl.arange(0, 64)
    a_at = x_at[:, None] + column[None, :]
    b_at = blocks + own.to(tl.int64) * (K // 128 * 3 * PART) + row[None, :] * 64 + column[:, None]
    acc = tl.zeros((BM, 64), dtype=tl.float32)
    for turn in range(K // 128):
        k, block = turn * 128, turn * (3 * PART)
        a = tl.load(a_at + k, mask=live[:, None], other=0.0)
        second_a = tl.load(a_at + k + 64, mask=live[:, None], other=0.0)
        b = tl.load(b_at + block, eviction_policy="evict_first")
        second_b = tl.load(b_at + block + PART, eviction_policy="evict_first")
        halves = tl.load(b_at + block + 2 * PART, eviction_policy="evict_first")
        w, second_w = numbers(b, second_b, halves, a.dtype)
        acc = tl.dot(a, w, acc, input_precision="ieee")
        acc = tl.dot(second_a, second_w, acc, input_precision="ieee")
    acc *= scale
    acc = _escapes(acc, x_at, live, place, value, scale, row, K)
    for at in tl.range(begin, end, 16, num_stages=1):
        there = at + slot < end
        place = tl.load(places + at + slot, mask=there, other=-1)
        value = tl.load(values + at + slot, mask=there, other=0.0)
        acc = _escapes(acc, x_at, live, place, value, scale, row, K)
    return acc


@triton.jit
def _escapes(acc, x_at, live, place, value, scale, row, K: tl.constexpr):
    """acc, with the numbers at these places instead of the power of two that stands there."""
    there = place >= 0
    column = tl.where(there, place % K, 0)
    x = tl.load(x_at[:, None] + column[None, :], mask=live[:, None], other=0.0)
    hit = tl.where(there, place // K, -1)[:, None] == row[None, :]
    base = scale * 4.656612873077393e-10  # 2^-31
    escaped = tl.where(hit, value.to(tl.float32)[:, None], 0.0).to(x.dtype)
    acc = tl.dot(x, escaped, acc, input_precision="ieee")
    return tl.dot(x, tl.where(hit, -base, 0.0).to(x.dtype), acc, input_precision="ieee")

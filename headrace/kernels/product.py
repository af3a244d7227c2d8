"""x W^T for few tokens: the stream of a weight matrix, shared by the layers of decode.

A step of few tokens IS the reading of its weights, so every row of the matrix is streamed once, and
the tokens are read again by each program (from the L2 cache). Layers differ only in which rows a
program takes and in what happens to its sums: `linear`, `gate_up` and `qkv` add an epilogue.

Pairs: with HALF > 0 a program takes pairs of rows (i, i + HALF) of a group of 2 HALF rows, next to
one another, so that the sums of a pair meet in one thread. gate_up is one group (HALF = ffn), qkv
one group a head (HALF = head_dim / 2).

RMSNorm folds into the product: x is multiplied by the norm's weight as it is loaded, x x^T runs
along (its diagonal is the sum of squares), and the sums are scaled at the end:
    RMSNorm(x) W^T = (x * g) W^T / sqrt(mean(x^2) + eps)
x * g is rounded to the dtype before it is normalised, so float16 has no room for it (65504). Of a
plain norm, whose g the matrix holds, x is taken as it is: no copy of it with g is made.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.rms_norm import rms_norm

MAX_TOKENS = 128
BUCKETS = (16, 32, 64, MAX_TOKENS)  # rows of the tile that holds the tokens
FOLD_TOKENS = 16  # the most tokens with which a norm folds into the product


Fold = Literal["", "plain", "gain"]  # of a norm in a product: nothing, its factor, its weight too


class Norm(NamedTuple):
    """RMSNorm: weight [K]; `plain`: it is 1 throughout, for the matrix holds what it was."""

    weight: Tensor
    eps: float
    plain: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """How a matrix is streamed. Sizes are powers of two.

    block_n rows a program, block_k columns a turn (of 16 bits; fewer of 32), `stages` of
    the pipeline, `split_k` programs that share the same rows, `prefetch_bytes` of its
    rows that a program fetches into the L2 cache while the kernel before ends (0: none; without
    dependent launches none). `fold_norm`: a norm folds into the product where it can; else it is a
    kernel of its own, before. `early`: the pipeline fills with weights before the kernel before
    ends, and x, which must wait, is not part of it but loaded a turn ahead; else both are.
    `stagger`: programs begin at columns of their own, so that not all of them ask for the same
    places of rows that lie a power of two apart, which few channels of the memory hold.
    """

    block_n: int
    block_k: int
    warps: int
    stages: int
    split_k: int = 1
    prefetch_bytes: int = 0
    fold_norm: bool = True
    early: bool = False
    stagger: bool = False


def shared_bytes(config: Config, bucket: int) -> int:
    """Shared memory of a program's pipeline for a tile of `bucket` tokens.

    Tiles of 64 tokens and more go through the asynchronous matrix unit (wgmma), which holds a stage
    more.
    """
    stages = config.stages if bucket >= 64 else config.stages - 1
    if config.early:  # x passes through shared memory once a turn
        return (bucket + config.block_n * stages) * config.block_k * 2
    return (bucket + config.block_n) * config.block_k * 2 * stages


class Workspace:
    """Partial sums of split products, one for a stream of kernels that run one after another.

    `locks` are zero between kernels: the last program of each group of rows leaves them so.
    """

    def __init__(
        self, device: torch.device, *, size_bytes: int = 32 << 20, tiles: int = 4096
    ) -> None:
        self.partials = torch.empty(size_bytes // 4, dtype=torch.float32, device=device)
        self.squares = torch.empty(tiles * FOLD_TOKENS * 16, dtype=torch.float32, device=device)
        self.locks = torch.zeros(tiles, dtype=torch.int32, device=device)

    def fits(self, tiles: int, block_m: int, config: Config) -> bool:
        """Whether a product of `tiles` groups of rows has room."""
        partials = tiles * config.split_k * block_m * config.block_n
        squares = tiles * config.split_k * FOLD_TOKENS
        room = partials <= self.partials.numel() and squares <= self.squares.numel()
        return room and tiles <= self.locks.numel()


def block_m(tokens: int) -> int:
    """Rows of the tile that holds `tokens`: one of BUCKETS."""
    assert 1 <= tokens <= MAX_TOKENS, f"{tokens} tokens: these kernels take 1 to {MAX_TOKENS}"
    return next(size for size in BUCKETS if tokens <= size)


def columns_a_turn(x: Tensor, config: Config) -> int:
    """block_k for elements of this size: no dtype has more bytes a turn.

    float32 has no matrix unit here: more than 32 columns at once spill its registers.
    """
    if x.element_size() == 2:
        return config.block_k
    return max(16, min(32, config.block_k // 2))


def early_columns(x: Tensor, config: Config) -> int:
    """Columns of its rows that a program loads before it waits; 0: none."""
    return (config.stages - 1) * columns_a_turn(x, config) if config.early else 0


def check(x: Tensor, weight: Tensor, norm: Norm | None) -> None:
    """x [m, K], weight [N, K]: contiguous, of one dtype, as the norm's weight [K] is."""
    assert x.ndim == weight.ndim == 2, "matrices"
    assert x.shape[1] == weight.shape[1], "x [m, K], weight [N, K]"
    assert x.is_contiguous(), "x: rows lie one after another"
    assert weight.is_contiguous(), "weight: rows lie one after another"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}"
    if norm is not None:
        assert norm[0].shape == (x.shape[1],), "the norm's weight is [K]"
        assert norm[0].dtype == x.dtype, "the norm's weight has the dtype of x"


def normed(
    x: Tensor, norm: Norm | None, config: Config, with_pdl: bool
) -> tuple[Tensor, Tensor, float, Fold]:
    """x as the product reads it, the norm's weight and eps, and how much of the norm folds in.

    It folds for few tokens (it runs on tiles of 16), with a weight not in float16 (see above).
    """
    if norm is None:
        return x, x, 0.0, ""
    gain, eps, plain = norm
    if config.fold_norm and x.shape[0] <= FOLD_TOKENS and (plain or x.dtype != torch.float16):
        return x, gain, eps, "plain" if plain else "gain"
    return rms_norm(x, gain, eps, with_pdl=with_pdl), gain, eps, ""


def scratch(
    x: Tensor, tiles: int, config: Config, workspace: Workspace | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Partials, squares and locks; x stands in where nothing is split and nothing read."""
    if config.split_k == 1:
        return x, x, x
    assert workspace is not None, "a split product needs a workspace"
    assert workspace.fits(tiles, block_m(x.shape[0]), config), "the workspace is too small"
    return workspace.partials, workspace.squares, workspace.locks


def staggers(config: Config, fold: Fold) -> bool:
    """Where columns are taken in turn: a norm's weight and an early pipeline look a turn ahead."""
    return config.stagger and fold != "gain" and not config.early


def prefetch_bytes(weight: Tensor, config: Config, with_pdl: bool) -> int:
    """What a program prefetches: nothing unless rows are whole multiples of 16 bytes."""
    aligned = weight.shape[1] * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    return config.prefetch_bytes if with_pdl and aligned else 0


@triton.jit
def fetch(
    weight,
    group,
    first_k,
    end_k,
    N: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    BN: tl.constexpr,
    BYTES: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    """Asks the L2 cache for the first BYTES / BN bytes of each of its rows, a piece a thread."""
    PIECES: tl.constexpr = THREADS // BN if THREADS > BN else 1
    PIECE: tl.constexpr = BYTES // (BN * PIECES) // 16 * 16
    SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    if PIECE > 0:
        thread = tl.arange(0, BN * PIECES)
        row = rows_of(group, thread // PIECES, N, HALF, BN)
        k = first_k + (thread % PIECES) * (PIECE // SIZE)
        left = tl.minimum(tl.maximum((end_k - k) * SIZE, 0), PIECE)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
            " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [weight + row * K + k, left],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def rows_of(group, j, N: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr):
    """Rows of the matrix that group `group` streams as its columns `j`; int64, always inside."""
    if HALF == 0:
        return tl.minimum(group * BN + j, N - 1).to(tl.int64)
    else:
        pair = tl.minimum(group * (BN // 2) + j // 2, N // 2 - 1)
        return (pair // HALF * (2 * HALF) + pair % HALF + (j % 2) * HALF).to(tl.int64)


@triton.jit
def load_x(x_at, live, k, column, K: tl.constexpr, EVEN: tl.constexpr):
    """x [BM, BK] from column k on, 0 where there is none."""
    if EVEN:
        return tl.load(x_at + k, mask=live[:, None], other=0.0)
    else:
        return tl.load(x_at + k, mask=live[:, None] & (k + column < K)[None, :], other=0.0)


@triton.jit
def ahead(
    weight,
    N: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    """What a program does before it waits for the kernel before."""
    if PREFETCH > 0:
        columns: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT) * BK
        first_k = tl.program_id(1) * columns
        end_k = tl.minimum(first_k + columns, K)
        fetch(weight, tl.program_id(0), first_k + EARLY, end_k, N, K, HALF, BN, PREFETCH, THREADS)


@triton.jit
def product(
    x,
    weight,
    gain,
    eps,
    partials,
    squares,
    locks,
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    STAGGER: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums [BM, BN] float32 of this program's group, and which tokens it must write [BM] bool.

    It waits for the kernel before; the caller releases the next, see `pdl`.

    Of the programs that split a group the last to arrive adds all parts, in order, and writes.
    """
    ahead(weight, N, K, HALF, BN, BK, SPLIT, PREFETCH, EARLY, THREADS)
    group = tl.program_id(0)
    part = tl.program_id(1)
    TURNS: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    EVEN: tl.constexpr = K == TURNS * BK * SPLIT
    first_k = part * (TURNS * BK)
    column = tl.arange(0, BK)
    if NORM == "gain":
        g = tl.load(gain + first_k + column, mask=first_k + column < K, other=0.0)
    token = tl.arange(0, BM)
    live = token < m
    row = rows_of(group, tl.arange(0, BN), N, HALF, BN)
    x_at = x + token[:, None] * K + column[None, :]
    weight_at = weight + row[None, :] * K + column[:, None]
    if EARLY == 0:
        pdl.wait(PDL)
    else:
        a = tl.zeros((BM, BK), dtype=x.dtype.element_ty)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    gram = tl.zeros((BM, BM), dtype=tl.float32)  # x x^T
    for turn in range(TURNS):
        if STAGGER:
            k = first_k + (turn + group) % TURNS * BK
        else:
            k = first_k + turn * BK
        if EVEN:
            b = tl.load(weight_at + k, eviction_policy="evict_first")
        else:
            b = tl.load(
                weight_at + k, mask=(k + column < K)[:, None], other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
        if EARLY == 0:
            a = load_x(x_at, live, k, column, K, EVEN)
        else:
            then = first_k + pdl.after_wait(turn, PDL) * BK
            if turn == 0:
                a = load_x(x_at, live, then, column, K, EVEN)
            next_a = load_x(x_at, live & (turn < TURNS - 1), then + BK, column, K, EVEN)
        if NORM != "":
            gram = tl.dot(a, tl.trans(a), gram, input_precision="ieee")
        if NORM == "gain":
            after = k + BK + column  # a turn ahead: its latency hides behind this turn's products
            next_g = tl.load(gain + after, mask=after < K, other=0.0)
            acc = tl.dot(a * g[None, :], b, acc, input_precision="ieee")
            g = next_g
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if EARLY > 0:
            a = next_a
    square = tl.sum(tl.where(token[:, None] == token[None, :], gram, 0.0), axis=1)

    if SPLIT > 1:
        at = token[:, None] * BN + tl.arange(0, BN)[None, :]
        base = group * SPLIT
        tl.store(partials + (base + part) * (BM * BN) + at, acc)
        if NORM != "":
            tl.store(squares + (base + part) * BM + token, square)
        tl.debug_barrier()  # every thread has stored before one of them says so
        last = tl.atomic_add(locks + group, 1, sem="acq_rel") == SPLIT - 1
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        square = tl.zeros((BM,), dtype=tl.float32)
        for i in tl.static_range(SPLIT):
            part_at = partials + (base + i) * (BM * BN) + at
            acc += tl.load(part_at, mask=last, other=0.0, cache_modifier=".cg")
            if NORM != "":
                square_at = squares + (base + i) * BM + token
                square += tl.load(square_at, mask=last, other=0.0, cache_modifier=".cg")
        tl.store(locks + group, 0, mask=last)
        live = live & last
    if NORM != "":
        acc = acc * tl.rsqrt(square / K + eps)[:, None]
    return acc, live


def norm_reference(x: Tensor, norm: Norm | None) -> Tensor:
    """RMSNorm of x [m, K] in float64 (https://arxiv.org/abs/1910.07467)."""
    x = x.double()
    if norm is None:
        return x
    weight, eps, _ = norm
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.double()

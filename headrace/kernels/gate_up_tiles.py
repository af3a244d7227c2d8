"""act(gate(x)) * up(x) for many tokens: half of a gated feed-forward layer in one kernel.

A card under a long load is at its power limit, so energy counts as much as time: between the
library's product and `activation` the sums go to memory and back, 4 F numbers a token. Here gate
and up of the same columns meet in one program's registers, and F numbers leave it.

Tiles of x and of both halves of the weight come through Hopper's tensor memory accelerator; every
program computes several tiles, those of one group of tokens next to one another.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.activation import ACTS, activate_pair, activation_reference
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output, check_scale

GROUP = 8  # tiles of tokens whose programs read the same rows of the weight at about the same time


@dataclasses.dataclass(frozen=True, slots=True)
class TileConfig:
    """A program's tile: tokens, columns of the result, and columns of x a turn of the loop; how its
    loads are spread over warps and how many are in flight. `flat`: the loops over tiles and over a
    tile's columns are one, so that loads of the next tile begin while the last one is written."""

    tokens: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 4
    flat: bool = True


@triton.jit(do_not_specialize=["tokens"])
def gate_up_tiles_kernel(
    x,  # descriptors: [tokens, K] by [BM, BK]
    weight,  # [2, FFN, K] by [2, BN, BK]
    out,  # [tokens, FFN] by [BM, BN]
    scale,
    tokens,
    FFN: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ACT: tl.constexpr,
    SCALED: tl.constexpr,
    FLAT: tl.constexpr,
) -> None:
    """Grid (PROGRAMS,)."""
    below = tl.cdiv(tokens, BM)
    across: tl.constexpr = (FFN + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), below * across, PROGRAMS, flatten=FLAT):
        first = tile // (GROUP * across) * GROUP
        rows = tl.minimum(below - first, GROUP)
        m = (first + tile % (GROUP * across) % rows) * BM
        n = tile % (GROUP * across) // rows * BN
        acc = tl.zeros((BM, 2 * BN), dtype=tl.float32)
        for k in range(0, K, BK):
            a = x.load([m, k])
            b = weight.load([0, n, k]).reshape(2 * BN, BK)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
        gate, up = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        if SCALED:
            token = m + tl.arange(0, BM)
            factor = tl.load(scale + token, mask=token < tokens, other=0.0)
            gate *= factor[:, None]
            up *= factor[:, None]
        out.store([m, n], activate_pair(gate, up, ACT).to(out.dtype))


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the copy engine takes them: elements of 16 bits, rows of whole 16 bytes."""
    aligned = all(t.data_ptr() % 16 == 0 and t.shape[1] % 8 == 0 for t in (x, weight))
    return x.element_size() == 2 and aligned and weight.shape[0] % 16 == 0


def gate_up_tiles(
    x: Tensor,
    weight: Tensor,
    act: str = "silu",
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    config: TileConfig,
    multiprocessors: int,
) -> Tensor:
    """x [T, K], weight [2 F, K], gate's rows first -> act(gate) * up [T, F]; `act` is one of ACTS.

    scale [T] float32: a factor of each token's row, before the activation. Summed and activated in
    float32, rounded once. Needs `fits`.
    """
    assert act in ACTS, f"{act} is none of {ACTS}"
    assert fits(x, weight), "rows of 16 bits a number and whole 16 bytes"
    (tokens, k), ffn = x.shape, weight.shape[0] // 2
    assert weight.shape == (2 * ffn, k), "x [T, K], weight [2 F, K]"
    assert x.is_contiguous(), "x: rows lie one after another"
    assert weight.is_contiguous(), "weight: rows lie one after another"
    check_scale(scale, tokens)
    out = torch.empty(tokens, ffn, dtype=x.dtype, device=x.device) if out is None else out
    check_output(out, (tokens, ffn))
    if tokens == 0:
        return out
    bm, bn, bk = config.tokens, config.columns, config.depth
    launch(
        gate_up_tiles_kernel,
        (multiprocessors,),
        TensorDescriptor.from_tensor(x, [bm, bk]),
        TensorDescriptor.from_tensor(weight.view(2, ffn, k), [2, bn, bk]),
        TensorDescriptor.from_tensor(out, [bm, bn]),
        x if scale is None else scale,  # never read where there is none
        tokens,
        FFN=ffn,
        K=k,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP=GROUP,
        PROGRAMS=multiprocessors,
        ACT=act,
        SCALED=scale is not None,
        FLAT=config.flat,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def gate_up_tiles_reference(
    x: Tensor, weight: Tensor, act: str = "silu", *, scale: Tensor | None = None
) -> Tensor:
    """The same in float64."""
    return activation_reference(x.double() @ weight.double().T, act, scale=scale)

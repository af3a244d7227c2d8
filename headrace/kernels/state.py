"""Small changes to what lives on the device: integers at addresses, and copies of KV blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch

_PAIRS = 256  # a program of `poke`
_PIECE = 4096  # elements a program of `copy_blocks` moves


@triton.jit(do_not_specialize_on_alignment=("state", "pairs", "count"))
def _poke_kernel(state, pairs, count, PAIRS: tl.constexpr, PDL: tl.constexpr):
    """Grid (programs for the capacity of pairs,); count [1] int32 says how many are real."""
    pdl.release(PDL)
    pdl.wait(PDL)
    i = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    real = i < tl.load(count)
    address = tl.load(pairs + i * 2, mask=real, other=0)
    value = tl.load(pairs + i * 2 + 1, mask=real, other=0)
    tl.store(state + address, value, mask=real)


def poke(state: Tensor, pairs: Tensor, count: Tensor, *, with_pdl: bool = False) -> None:
    """state[address] = value for the first count[0] pairs, on the device.

    All int32: state [n], pairs [m, 2] of (address, value) with distinct addresses in [0, n),
    count [1] with count[0] <= m: it is read on the device, so that a captured call serves any
    number of pairs.
    """
    assert state.dtype == pairs.dtype == count.dtype == torch.int32, "poke takes int32"
    assert state.is_contiguous(), "state must be contiguous"
    assert pairs.is_contiguous(), "pairs must be contiguous"
    if pairs.shape[0]:
        grid = (triton.cdiv(pairs.shape[0], _PAIRS),)
        launch(
            _poke_kernel,
            grid,
            state,
            pairs,
            count,
            PAIRS=_PAIRS,
            num_warps=4,
            **pdl.options(with_pdl),
        )


def poke_reference(state: Tensor, pairs: Tensor, count: Tensor) -> None:
    """What `poke` does."""
    some = pairs[: int(count)].long()
    state[some[:, 0]] = some[:, 1].int()


@triton.jit(do_not_specialize_on_alignment=("pairs",))
def _copy_kernel(
    k,
    v,
    pairs,
    k_layer,
    v_layer,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (pieces of a block, pairs, layers); k_layer and v_layer are strides, in elements."""
    pdl.release(PDL)
    pdl.wait(PDL)
    pair, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    source = tl.load(pairs + pair * 2).to(tl.int64) * SIZE
    target = tl.load(pairs + pair * 2 + 1).to(tl.int64) * SIZE
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = at < SIZE
    k += layer * k_layer
    v += layer * v_layer
    key = tl.load(k + source + at, mask=inside)
    value = tl.load(v + source + at, mask=inside)
    tl.store(k + target + at, key, mask=inside)
    tl.store(v + target + at, value, mask=inside)


def copy_blocks(
    k: Tensor, v: Tensor, pairs: Tensor, on_device: Tensor, *, with_pdl: bool = False
) -> None:
    """Copies whole KV blocks of every layer, all as if at the same moment.

    k and v are views [layers, blocks, ...] of one shape and dtype, each block contiguous (the
    layers may be strided: K and V may lie in one allocation). pairs [m, 2] int32 of
    (source, target) on the host, on_device the same on the device: distinct targets, no target
    also a source.
    """
    sources, targets = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    blocks = k.shape[1]
    assert k.shape == v.shape, f"k {tuple(k.shape)}, v {tuple(v.shape)}"
    assert k.dtype == v.dtype, f"k {k.dtype}, v {v.dtype}"
    assert k[0].is_contiguous(), "blocks of k must be contiguous"
    assert v[0].is_contiguous(), "blocks of v must be contiguous"
    assert len(set(targets)) == len(targets), "two copies into one block"
    assert not set(targets) & set(sources), "a block is both source and target of one call"
    assert all(0 <= b < blocks for b in sources + targets), "a copy outside the cache"
    assert on_device.shape == pairs.shape, "on_device must hold the same pairs"
    assert on_device.is_contiguous(), "on_device must be contiguous"
    if not targets:
        return
    size = k[0, 0].numel()
    grid = (triton.cdiv(size, _PIECE), len(targets), k.shape[0])
    launch(
        _copy_kernel,
        grid,
        k,
        v,
        on_device,
        k.stride(0),
        v.stride(0),
        SIZE=size,
        PIECE=_PIECE,
        num_warps=8,
        **pdl.options(with_pdl),
    )


def copy_blocks_reference(k: Tensor, v: Tensor, pairs: Tensor) -> None:
    """What `copy_blocks` does."""
    source, target = pairs.long().unbind(1)
    k[:, target] = k[:, source].clone()
    v[:, target] = v[:, source].clone()

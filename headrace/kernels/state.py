"""Writes to tables on the device: scattered values, and whole KV blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launch import launch

_PAIRS = 256  # pairs of one program
_LINE = 1024  # elements of a block that one program copies


@triton.jit(do_not_specialize=["count"])
def poke_kernel(state, pairs, count, PAIRS: tl.constexpr):
    i = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = i < count
    address = tl.load(pairs + 2 * i, mask=inside, other=0)
    value = tl.load(pairs + 2 * i + 1, mask=inside, other=0)
    tl.store(state + address, value, mask=inside)


def poke(state: Tensor, pairs: Tensor, count: int) -> None:
    """state[address] = value for the first `count` of `pairs` [m, 2] (address, value).

    All int32 and contiguous; addresses are distinct.
    """
    assert state.is_contiguous(), "state must be contiguous"
    assert pairs.is_contiguous(), "pairs must be contiguous"
    assert count <= pairs.shape[0], f"{count} of {pairs.shape[0]} pairs"
    launch(poke_kernel, (max(1, triton.cdiv(count, _PAIRS)),), state, pairs, count, PAIRS=_PAIRS)


@triton.jit(do_not_specialize=["blocks"])
def copy_kernel(cache, pairs, blocks, SIZE: tl.constexpr, LINE: tl.constexpr):
    """Grid (pairs, parts of a block, tensors)."""
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    target = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    at = tl.program_id(1) * LINE + tl.arange(0, LINE)
    tensor = tl.program_id(2).to(tl.int64) * blocks
    value = tl.load(cache + (tensor + source) * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(cache + (tensor + target) * SIZE + at, value, mask=at < SIZE)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """cache[..., target, :] = cache[..., source, :] for each of `pairs` [m, 2] (source, target).

    cache [layers, 2, blocks, kv_heads, block_size, head_dim], contiguous; pairs int32 on its
    device. No target is a source or a target of another pair.
    """
    assert cache.is_contiguous(), "one allocation"
    layers, two, blocks = cache.shape[:3]
    size = cache[0, 0, 0].numel()
    grid = (pairs.shape[0], triton.cdiv(size, _LINE), layers * two)
    launch(copy_kernel, grid, cache, pairs, blocks, SIZE=size, LINE=_LINE)

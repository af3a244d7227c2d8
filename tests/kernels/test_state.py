"""Pokes and copies of blocks change what they name, and nothing else."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.state import copy_blocks, copy_blocks_reference, poke, poke_reference


@pytest.mark.parametrize(("n", "capacity", "count"), [(5, 3, 2), (1000, 600, 599), (9, 4, 0)])
def test_poke(device: torch.device, n: int, capacity: int, count: int) -> None:
    maker = torch.Generator().manual_seed(n)
    state = torch.randint(-(2**31), 2**31 - 1, (n,), generator=maker, dtype=torch.int32)
    pairs = torch.stack(
        (
            torch.randperm(n, generator=maker)[:capacity].int(),
            torch.randint(-(2**31), 2**31 - 1, (capacity,), generator=maker, dtype=torch.int32),
        ),
        1,
    )
    pairs[count:, 0] = 2**30  # garbage after the real ones
    number = torch.tensor([count], dtype=torch.int32)
    here = state.to(device)
    poke(here, pairs.to(device), number.to(device))
    poke_reference(state, pairs, number)
    assert torch.equal(here.cpu(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("together", [False, True])
def test_copy_blocks(device: torch.device, dtype: torch.dtype, together: bool) -> None:
    """Blocks of 3 x 16 x 100 elements: more than one piece, and not a multiple of it."""
    shape = (2, 7, 3, 16, 100)
    both = torch.randn((shape[0], 2, *shape[1:])).to(dtype)  # K and V of a layer together
    k, v = both[:, 0], both[:, 1]
    if not together:
        k, v = k.contiguous(), v.contiguous()
    pairs = torch.tensor([[0, 5], [0, 2], [6, 1]], dtype=torch.int32)
    on = both.to(device)
    device_k, device_v = on[:, 0], on[:, 1]
    if not together:
        device_k, device_v = device_k.contiguous(), device_v.contiguous()
    copy_blocks(device_k, device_v, pairs, pairs.to(device))
    copy_blocks_reference(k, v, pairs)
    assert torch.equal(device_k.cpu(), k)
    assert torch.equal(device_v.cpu(), v)
    assert torch.equal(device_k[:, 5].cpu(), k[:, 0])


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([[0, 1], [2, 1]], "two copies"),
        ([[0, 1], [1, 2]], "both source and target"),
        ([[0, 4]], "outside"),
    ],
)
def test_copies_that_have_no_order_are_refused(pairs: list[list[int]], why: str) -> None:
    k, v = torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)
    table = torch.tensor(pairs, dtype=torch.int32)
    with pytest.raises(AssertionError, match=why):
        copy_blocks(k, v, table, table)

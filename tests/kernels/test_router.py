"""Routing and the order by experts, against plain references."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import pdl
from headrace.kernels.dispatch import (
    Dispatch,
    DispatchScratch,
    dispatch,
    dispatch_reference,
    most_tiles,
    route_and_dispatch,
)
from headrace.kernels.product import Workspace
from headrace.kernels.route_few import FEW_TOKENS, logits_reference, route_few
from headrace.kernels.router import Routing, route_reference
from tests.kernels.conftest import CUDA

ROUTINGS = {
    "softmax": Routing(6, 2),
    "plain": Routing(8, 3, renormalise=False, shared=2),
    "scaled": Routing(5, 5, scale=2.5),
    "groups": Routing(12, 4, renormalise=False, scale=16.0, groups=3, top_groups=2),
    "pairs": Routing(
        16, 3, "sigmoid", scale=2.5, groups=4, top_groups=2, group_pairs=True, shared=1
    ),
    "sigmoid": Routing(7, 2, "sigmoid", renormalise=False),
}


def check(
    routing: Routing, tokens: int, tile_rows: int, device: torch.device, *, seed: int = 0
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, routing.experts, generator=rng)
    sigmoid = routing.scoring == "sigmoid"
    correction = torch.randn(routing.experts, generator=rng).to(device) if sigmoid else None
    spare = 3
    rows = torch.randint(4, (tokens,), generator=rng).int().to(device)
    logits[rows.cpu() == spare] = torch.nan  # nobody asks what padding holds
    logits = logits.to(device)
    into = DispatchScratch(tokens, routing, device).of(tokens, tile_rows)
    for tensor in (into.experts, into.weights, into.order, into.tile_experts):
        tensor.fill_(99)
    tally = torch.full((2, routing.total), 5, dtype=torch.int64, device=device)
    route_and_dispatch(
        logits, routing, into, correction=correction, rows=rows, spare=spare, tally=tally,
        with_pdl=pdl.supported(device),
    )  # fmt: skip
    ids, weights = route_reference(logits.nan_to_num(0.0), routing, correction, rows, spare)
    assert into.experts.tolist() == ids.tolist()
    torch.testing.assert_close(into.weights.double(), weights, rtol=1e-5, atol=1e-6)
    check_order(into, routing, tally)


def check_order(into: Dispatch, routing: Routing, tally: torch.Tensor) -> None:
    tiles, order = dispatch_reference(into.experts, routing.total, into.tile_rows)
    used = len(tiles)
    assert into.tile_experts.tolist() == tiles + [-1] * (into.tiles - used)
    assert into.order[:used].reshape(-1).tolist() == order
    counts = torch.bincount(into.experts[into.experts >= 0], minlength=routing.total)
    assert tally[0].tolist() == (5 + counts).tolist()
    assert tally[1].tolist() == (5 + (counts > 0)).tolist()


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        *(("softmax", 1), ("plain", 5), ("scaled", 3), ("groups", 5), ("pairs", 2)),
        *(("sigmoid", 5), ("pairs", 17)),
    ],
)
def test_routing(name: str, tokens: int, device: torch.device) -> None:
    check(ROUTINGS[name], tokens, 4, device)


def test_many_items(device: torch.device) -> None:
    """More than one turn of assignments, tiles of an expert in the hundreds."""
    routing = Routing(7, 5)
    into = DispatchScratch(1000, routing, device).of(1000, 2)
    rng = torch.Generator().manual_seed(1)
    into.experts.copy_(torch.randint(-1, 7, (1000, 5), generator=rng))
    tally = torch.full((2, 7), 5, dtype=torch.int64, device=device)
    dispatch(routing, into, tally=tally, with_pdl=pdl.supported(device))
    check_order(into, routing, tally)


def test_one_turn_of_items(device: torch.device) -> None:
    routing = Routing(7, 5)
    into = DispatchScratch(800, routing, device).of(800, 4)
    rng = torch.Generator().manual_seed(1)
    into.experts.copy_(torch.randint(-1, 7, (800, 5), generator=rng))
    tally = torch.full((2, 7), 5, dtype=torch.int64, device=device)
    dispatch(routing, into, tally=tally, with_pdl=pdl.supported(device))
    check_order(into, routing, tally)


def test_all_tokens_of_one_expert(device: torch.device) -> None:
    routing = Routing(4, 1)
    into = DispatchScratch(9, routing, device).of(9, 2)
    logits = torch.zeros(9, 4, device=device)
    logits[:, 2] = 1.0
    tally = torch.full((2, 4), 5, dtype=torch.int64, device=device)
    route_and_dispatch(logits, routing, into, tally=tally)
    assert into.experts.tolist() == [[2]] * 9
    check_order(into, routing, tally)


def test_ids_stay_inside_whatever_the_logits_are(device: torch.device) -> None:
    for routing in (ROUTINGS["softmax"], ROUTINGS["pairs"]):
        logits = torch.full((3, routing.experts), torch.nan, device=device)
        logits[1] = -torch.inf
        into = DispatchScratch(3, routing, device).of(3, 4)
        route_and_dispatch(logits, routing, into)
        assert int(into.experts.min()) >= 0
        assert int(into.experts.max()) < routing.total


def test_the_worst_routing_fits() -> None:
    routing = Routing(4, 2)
    assert most_tiles(1, routing, 16) == 2
    assert most_tiles(2, routing, 16) == 4
    assert most_tiles(17, routing, 16) == 4 + 30 // 16


def check_few(
    routing: Routing, tokens: int, tile_rows: int, device: torch.device, *, biased: bool = True
) -> None:
    """Integers that every sum holds exactly, so that no choice hangs on rounding."""
    rng = torch.Generator().manual_seed(tokens)
    hidden, spare = 600 if tokens < 3 else 72, 3  # several programs share a row, or one has it
    x = torch.randint(-3, 4, (tokens, hidden), generator=rng) / 128
    weight = torch.randint(-3, 4, (routing.experts, hidden), generator=rng).float()
    weight += torch.arange(routing.experts)[:, None] / 64  # hardly two logits alike
    bias = torch.randn(routing.experts, generator=rng).to(device) if biased else None
    rows = torch.randint(4, (tokens,), generator=rng).int()
    rows[0] = 0
    x[rows == spare] = torch.nan  # nobody asks what padding holds
    x, weight, rows = (t.to(device) for t in (x, weight, rows))
    sigmoid = routing.scoring == "sigmoid"
    correction = torch.randn(routing.experts, generator=rng).to(device) if sigmoid else None
    into = DispatchScratch(tokens, routing, device).of(tokens, tile_rows)
    for tensor in (into.experts, into.weights, into.order, into.tile_experts):
        tensor.fill_(99)
    tally = torch.full((2, routing.total), 5, dtype=torch.int64, device=device)
    workspace = Workspace(device, size_bytes=1 << 20, tiles=64)
    for _ in range(2):  # the second finds the counter as the first has left it
        tally.fill_(5)
        route_few(
            x, weight, routing, into, bias=bias, correction=correction, rows=rows,
            spare=spare, tally=tally, workspace=workspace,
            with_pdl=pdl.supported(device),
        )  # fmt: skip
    logits = logits_reference(x, weight, bias)
    ids, weights = route_reference(logits.nan_to_num(0.0), routing, correction, rows, spare)
    assert into.experts.tolist() == ids.tolist()
    torch.testing.assert_close(into.weights.double(), weights, rtol=1e-4, atol=1e-5)
    check_order(into, routing, tally)


@pytest.mark.parametrize(
    ("name", "tokens", "tile_rows"),
    [("softmax", 1, 16), ("plain", FEW_TOKENS, 2), ("groups", 3, 16), ("pairs", 2, 16)],
)
def test_few(name: str, tokens: int, tile_rows: int, device: torch.device) -> None:
    check_few(ROUTINGS[name], tokens, tile_rows, device, biased=name != "groups")


@pytest.mark.skipif(not CUDA, reason="sizes of real models, on a GPU")
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_few_of_real_models(tokens: int, device: torch.device) -> None:
    for routing in (Routing(128, 8), Routing(64, 6, renormalise=False, shared=2)):
        check_few(routing, tokens, 16, device)

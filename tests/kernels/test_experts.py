"""The grouped products of a mixture of experts against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.kernels import pdl
from headrace.kernels.dispatch import DispatchScratch, route_and_dispatch
from headrace.kernels.experts import (
    ExpertsConfig,
    combine,
    expert_down,
    expert_gate_up,
    experts_reference,
)
from headrace.kernels.router import Routing
from tests.kernels.conftest import CUDA, assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
SMALL = ExpertsConfig(16, 64, 4, 3)
CASES = {  # tokens, hidden, ffn, routing, rows of a tile, configuration, limit
    "one": (1, 48, 20, Routing(5, 2), 16, SMALL, 0.0),
    "odd": (7, 53, 21, Routing(4, 2, renormalise=False, shared=1), 16, SMALL, 0.8),
    "sorted": (18, 32, 16, Routing(2, 1), 4, ExpertsConfig(32, 16, 4, 2), 0.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_layer(name: str, dtype: torch.dtype, device: torch.device) -> None:
    tokens, hidden, ffn, routing, tile_rows, config, limit = CASES[name]
    rng = torch.Generator().manual_seed(7)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng) * scale).to(dtype).to(device)

    x, residual = draw(tokens, hidden), draw(tokens, hidden)
    gate_up = draw(routing.total, 2 * ffn, hidden, scale=hidden**-0.5)
    down = draw(routing.total, hidden, ffn, scale=ffn**-0.5)
    biased = limit > 0
    biases = (draw(routing.total, 2 * ffn), draw(routing.total, hidden)) if biased else None
    rows = torch.arange(tokens, dtype=torch.int32, device=device)
    spare = tokens - 1 if tokens > 1 else -1
    plan = DispatchScratch(tokens, routing, device).of(tokens, tile_rows)
    logits = torch.randn(tokens, routing.experts, generator=rng).to(device)
    with_pdl = pdl.supported(device)
    options: dict[str, Any] = {"config": config, "with_pdl": with_pdl}
    route_and_dispatch(logits, routing, plan, rows=rows, spare=spare, with_pdl=with_pdl)

    items = tokens * routing.each
    inner = torch.full((items, ffn), torch.nan, dtype=dtype, device=device)
    y = torch.full((items, hidden), torch.nan, dtype=dtype, device=device)
    bias_up, bias_down = biases if biases is not None else (None, None)
    expert_gate_up(x, gate_up, plan, bias=bias_up, limit=limit, out=inner, **options)
    expert_down(inner, down, plan, bias=bias_down, out=y, **options)
    reference = experts_reference(
        x, gate_up, down, plan.experts, plan.weights, biases=biases, limit=limit
    )
    out = torch.full((tokens, hidden), torch.nan, dtype=dtype, device=device)
    assert_close(combine(y, plan, out=out, with_pdl=with_pdl), reference, dtype)
    before = residual.clone()
    combine(y, plan, residual=residual, out=residual, with_pdl=with_pdl)
    assert_close(residual, reference + before.double(), dtype)
    if spare >= 0:
        assert torch.equal(residual[spare], before[spare]), "padding gets the residual alone"

"""Activations, with and without a gate, sparse gates and soft caps against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.kernels import pdl
from headrace.kernels.activation import ACTS, activation, activation_reference
from headrace.kernels.gate_up import gate_up, gate_up_reference
from headrace.kernels.linear import linear, linear_reference
from headrace.kernels.product import Workspace
from headrace.kernels.soft_cap import cap_rows, soft_cap_reference
from headrace.kernels.sparse import sparse_gate, sparse_gate_reference
from tests.kernels.conftest import CUDA, assert_close
from tests.kernels.test_linear import SPLIT, draw, poisoned

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LARGE = pytest.mark.skipif(not CUDA, reason="NOT RUN: large shapes need the GPU")
SIZES = [(3, 53), (1, 2050), pytest.param(8192, 13824, marks=LARGE)]  # T, F


def extras(
    given: tuple[str, ...], tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    every = {
        "scale": torch.rand(tokens, device=device),
        "bias": draw(width, dtype=dtype, device=device),
    }
    return {name: every[name] for name in given}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [(), ("scale", "bias")], ids="+".join)
@pytest.mark.parametrize("act", ["silu", "clamped"])
@pytest.mark.parametrize(("tokens", "ffn"), SIZES)
def test_gated(
    tokens: int,
    ffn: int,
    act: str,
    given: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x = draw(tokens, 2 * ffn, dtype=dtype, device=device, scale=4.0)
    more = extras(given, tokens, 2 * ffn, dtype, device)
    out = poisoned(tokens, ffn, dtype=dtype, device=device)
    activation(x, act, out=out, with_pdl=pdl.supported(device), **more)
    assert_close(out, activation_reference(x, act, **more), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("act", ACTS[:-1])
def test_every_activation(act: str, gated: bool, dtype: torch.dtype, device: torch.device) -> None:
    x = draw(3, 106, dtype=dtype, device=device, scale=1.5)
    far = 90.0 if CUDA else 6.0  # the interpreter warns where exp is infinite
    x[0, :4] = torch.tensor([-far, far, 0.0, -5.0])
    more = extras(("scale", "bias"), 3, 106, dtype, device)
    out = poisoned(3, 53 if gated else 106, dtype=dtype, device=device)
    activation(x, act, gated=gated, out=out, with_pdl=pdl.supported(device), **more)
    expected = activation_reference(x, act, gated=gated, **more)
    assert_close(out, expected, dtype)
    if not gated:
        assert_close(activation(x, act, gated=False, out=x, **more), expected, dtype)


@pytest.mark.parametrize("act", ACTS)
def test_in_the_ends_of_products(act: str, device: torch.device) -> None:
    dtype = torch.float32
    x = draw(3, 48, dtype=dtype, device=device)
    weight = draw(66, 48, dtype=dtype, device=device, scale=48**-0.5)
    bias = draw(66, dtype=dtype, device=device)
    options: dict[str, Any] = {"config": SPLIT, "workspace": Workspace(device)}
    out = poisoned(3, 33, dtype=dtype, device=device)
    gate_up(x, weight, bias=bias, act=act, out=out, **options)
    assert_close(out, gate_up_reference(x, weight, bias=bias, act=act), dtype)
    if act != "clamped":
        out = poisoned(3, 66, dtype=dtype, device=device)
        linear(x, weight, bias=bias, act=act, cap=3.0, out=out, **options)
        assert_close(out, linear_reference(x, weight, bias=bias, act=act, cap=3.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 16), (3, 53), (2, 2050)])
def test_soft_cap(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    x = draw(rows, n, dtype=dtype, device=device, scale=20.0)
    expected = soft_cap_reference(x, 7.5)
    assert cap_rows(x, 7.5, with_pdl=pdl.supported(device)) is x
    assert_close(x, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(("tokens", "ffn"), [(3, 53), (1, 2050)])
def test_sparse_gate(
    tokens: int, ffn: int, scaled: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Of a gate whose mean is far from 0, so that a bound without it shows."""
    x = draw(tokens, 2 * ffn, dtype=dtype, device=device) + 1
    scale = extras(("scale",), tokens, ffn, dtype, device)["scale"] if scaled else None
    for deviations in (1.6449, -0.5):
        out = poisoned(tokens, ffn, dtype=dtype, device=device)
        with_pdl = pdl.supported(device)
        sparse_gate(x, deviations, "gelu_tanh", scale=scale, out=out, with_pdl=with_pdl)
        expected = sparse_gate_reference(x, deviations, "gelu_tanh", scale=scale)
        assert_close(out, expected, dtype)
        dropped = float((out == 0).float().mean())
        assert dropped > 0.9 if deviations > 0 else dropped < 0.5

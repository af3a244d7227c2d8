"""linear, gate_up and qkv against float64: odd sizes, poisoned outputs, every dtype."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.gate_up import gate_up, gate_up_reference
from headrace.kernels.linear import linear, linear_reference
from headrace.kernels.product import Config, Norm, Workspace, block_m
from headrace.kernels.qkv import qkv, qkv_reference
from tests.kernels.conftest import CUDA, assert_close
from tests.kernels.paged import paged, written

BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not CUDA,
        reason="NOT RUN: bfloat16 runs on the card; float32 and float16 cover the logic here",
    ),
)
DTYPES = [torch.float32, torch.float16, BFLOAT16]
PLAIN = Config(block_n=16, block_k=16, warps=1, stages=2)
SPLIT = Config(block_n=16, block_k=16, warps=1, stages=2, split_k=3)
WIDE = Config(block_n=32, block_k=64, warps=4, stages=3, prefetch_bytes=16384)
EARLY = dataclasses.replace(PLAIN, stages=3, early=True)
EARLY_SPLIT = dataclasses.replace(SPLIT, early=True)
STAGGERED = dataclasses.replace(SPLIT, stagger=True)
CASES = [  # m, N, K
    pytest.param(1, 48, 64, EARLY, id="one-token-early"),
    pytest.param(16, 40, 16, EARLY, id="one-turn-early"),
    pytest.param(5, 37, 53, EARLY_SPLIT, id="odd-split-early"),
    pytest.param(70, 33, 48, EARLY, id="128-tokens-early"),
    pytest.param(1, 48, 64, PLAIN, id="one-token"),
    pytest.param(3, 37, 53, SPLIT, id="odd-split"),
    pytest.param(3, 37, 101, STAGGERED, id="odd-split-staggered"),
    pytest.param(5, 37, 53, WIDE, id="odd-wide"),
    pytest.param(16, 16, 96, SPLIT, id="even-split"),
    pytest.param(16, 32, 128, WIDE, id="even-wide"),
    pytest.param(17, 40, 32, PLAIN, id="32-tokens"),
    pytest.param(40, 33, 48, SPLIT, id="64-tokens"),
    pytest.param(100, 33, 48, SPLIT, id="128-tokens"),
]


def draw(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(device)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k", "config"), CASES)
def test_linear(
    m: int, n: int, k: int, config: Config, dtype: torch.dtype, device: torch.device
) -> None:
    x = draw(m, k, dtype=dtype, device=device)
    weight = draw(n, k, dtype=dtype, device=device, scale=k**-0.5)
    bias = draw(n, dtype=dtype, device=device)
    residual = draw(m, n, dtype=dtype, device=device)
    workspace = Workspace(device)
    options = {"config": config, "workspace": workspace, "with_pdl": pdl.supported(device)}
    for given in ({}, {"bias": bias}, {"bias": bias, "residual": residual}):
        out = poisoned(m, n, dtype=dtype, device=device)
        linear(x, weight, **given, out=out, **options)  # type: ignore[arg-type]
        reference = linear_reference(x, weight, **given)  # type: ignore[arg-type]
        assert_close(out, reference, dtype)
    out = residual.clone()
    linear(x, weight, residual=out, out=out, **options)  # type: ignore[arg-type]
    assert_close(out, linear_reference(x, weight, residual=residual), dtype)
    assert not workspace.locks.any(), "locks are zero between kernels"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("m", "n", "k", "config"), CASES)
def test_norm(
    m: int, n: int, k: int, config: Config, plain: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = draw(m, k, dtype=dtype, device=device, scale=3.0)
    weight = draw(2 * n, k, dtype=dtype, device=device, scale=k**-0.5)
    gain = torch.ones_like(x[0]) if plain else draw(k, dtype=dtype, device=device)
    norm = Norm(gain, 1e-6, plain)
    options = {
        "norm": norm,
        "config": config,
        "workspace": Workspace(device),
        "with_pdl": pdl.supported(device),
    }
    out = poisoned(m, 2 * n, dtype=torch.float32, device=device)  # logits
    linear(x, weight, out=out, **options)  # type: ignore[arg-type]
    assert_close(out, linear_reference(x, weight, norm=norm), dtype)
    out = poisoned(m, n, dtype=dtype, device=device)
    gate_up(x, weight, out=out, **options)  # type: ignore[arg-type]
    assert_close(out, gate_up_reference(x, weight, norm=norm), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "f", "k", "config"), CASES)
def test_gate_up(
    m: int, f: int, k: int, config: Config, dtype: torch.dtype, device: torch.device
) -> None:
    x = draw(m, k, dtype=dtype, device=device)
    weight = draw(2 * f, k, dtype=dtype, device=device, scale=k**-0.5)
    out = poisoned(m, f, dtype=dtype, device=device)
    gate_up(
        x,
        weight,
        out=out,
        config=config,
        workspace=Workspace(device),
        with_pdl=pdl.supported(device),
    )
    assert_close(out, gate_up_reference(x, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "heads", "kv_heads", "d", "k", "config"),
    [
        (1, 2, 1, 16, 32, PLAIN),
        (5, 3, 3, 4, 40, SPLIT),
        (16, 4, 2, 8, 64, WIDE),
        (20, 2, 1, 20, 32, PLAIN),
        (6, 3, 1, 16, 53, SPLIT),
    ],
)
def test_qkv(
    m: int,
    heads: int,
    kv_heads: int,
    d: int,
    k: int,
    config: Config,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    rows = (heads + 2 * kv_heads) * d
    x = draw(m, k, dtype=dtype, device=device)
    weight = draw(rows, k, dtype=dtype, device=device, scale=k**-0.5)
    bias = draw(rows, dtype=dtype, device=device)
    norm = Norm(draw(k, dtype=dtype, device=device), 1e-5)
    gains = (draw(d, dtype=dtype, device=device), draw(d, dtype=dtype, device=device), 1e-2)
    norms = gains if config.block_n == d else None  # a program has the rows of a head
    for given_bias, given_norm in ((bias, None), (None, norm)):
        v_eps = 1e-2 if norms is not None and given_bias is None else 0.0
        ours = paged(m, kv_heads, d, dtype, device)
        theirs = paged(m, kv_heads, d, dtype, device)
        args = (ours.columns, ours.cos, ours.sin)
        q = qkv(
            x,
            weight,
            given_bias,
            *args,
            ours.k,
            ours.v,
            heads=heads,
            norm=given_norm,
            norms=norms,
            v_eps=v_eps,
            q=poisoned(m, heads, d, dtype=dtype, device=device),
            config=config,
            workspace=Workspace(device),
            with_pdl=pdl.supported(device),
        )
        reference = qkv_reference(
            x, weight, given_bias, *args, theirs.k, theirs.v,
            heads=heads, norm=given_norm, norms=norms, v_eps=v_eps,
        )  # fmt: skip
        assert_close(q, reference, dtype)
        for mine, reference in ((ours.k, theirs.k), (ours.v, theirs.v)):
            places = written(reference)
            assert torch.equal(written(mine), places)
            assert places.any()
            assert_close(mine[places], reference[places], dtype)


def test_float16_is_normed_before_the_product(device: torch.device) -> None:
    """x * g leaves float16's range here, RMSNorm(x) does not."""
    x = torch.full((2, 32), 3e4, dtype=torch.float16, device=device)
    norm = Norm(torch.full((32,), 4.0, dtype=torch.float16, device=device), 1e-6)
    weight = draw(16, 32, dtype=torch.float16, device=device)
    out = linear(x, weight, norm=norm, config=PLAIN)
    assert_close(out, linear_reference(x, weight, norm=norm), torch.float16)


def test_a_token_has_the_same_sums_alone_and_among_others(device: torch.device) -> None:
    x = draw(16, 64, dtype=torch.float32, device=device)
    weight = draw(48, 64, dtype=torch.float32, device=device)
    norm = Norm(draw(64, dtype=torch.float32, device=device), 1e-6)
    for config in (PLAIN, SPLIT):
        workspace = Workspace(device)
        many = linear(x, weight, norm=norm, config=config, workspace=workspace)
        one = linear(x[5:6].clone(), weight, norm=norm, config=config, workspace=workspace)
        assert torch.equal(many[5], one[0])


def test_what_it_cannot_do_it_refuses(device: torch.device) -> None:
    x = draw(17, 32, dtype=torch.float32, device=device)
    weight = draw(16, 32, dtype=torch.float32, device=device)
    gain = torch.ones(32, device=device)
    with pytest.raises(AssertionError, match="the norm's weight has the dtype"):
        linear(x, weight, norm=Norm(gain.half(), 1e-6), config=PLAIN)
    with pytest.raises(AssertionError, match="the norm's weight is"):
        linear(x, weight, norm=Norm(gain[:31], 1e-6), config=PLAIN)
    with pytest.raises(AssertionError, match="needs a workspace"):
        linear(x, weight, config=SPLIT)
    with pytest.raises(AssertionError, match="129 tokens"):
        block_m(129)


@pytest.mark.skipif(not CUDA, reason="NOT RUN: the 14B's shapes need the GPU")
@pytest.mark.parametrize("m", [1, 16, 31, 64])
@pytest.mark.parametrize(("n", "k"), [(7168, 5120), (5120, 13824)])
def test_shapes_of_a_real_model(m: int, n: int, k: int, device: torch.device) -> None:
    dtype = torch.bfloat16
    x = draw(m, k, dtype=dtype, device=device)
    weight = draw(n, k, dtype=dtype, device=device, scale=k**-0.5)
    norm = Norm(draw(k, dtype=dtype, device=device), 1e-6)
    for split in (1, 4):
        config = Config(32, 128, 4, 4, split, 32768)
        workspace = Workspace(device)
        for _ in range(3):  # the workspace is used again
            out = poisoned(m, n, dtype=dtype, device=device)
            linear(x, weight, norm=norm, out=out, config=config, workspace=workspace, with_pdl=True)
            assert_close(out, linear_reference(x, weight, norm=norm), dtype)

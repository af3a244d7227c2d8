"""Norms, rotary_write and begin against float64: odd sizes, poisoned outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.activation import activation
from headrace.kernels.begin import begin, begin_reference
from headrace.kernels.layer_norm import layer_norm, layer_norm_reference
from headrace.kernels.norm_add import norm_add, norm_add_reference
from headrace.kernels.rms_norm import (
    inverse_rms,
    inverse_rms_reference,
    rms_norm,
    rms_norm_reference,
)
from headrace.kernels.rotary import rotary_write, rotary_write_reference
from headrace.kernels.soft_cap import cap_rows
from tests.kernels.conftest import CUDA, assert_close
from tests.kernels.paged import paged, written

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EXACT = DTYPES if CUDA else DTYPES[:2]  # the interpreter cuts to bfloat16, it does not round
LARGE = pytest.mark.skipif(not CUDA, reason="NOT RUN: large shapes need the GPU")
SIZES = [(1, 16), (3, 53), (5, 640), pytest.param(8192, 5120, marks=LARGE)]  # T, K


def draw(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "k"), SIZES)
def test_rms_norm(tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = draw(tokens, k, dtype=dtype, device=device), draw(k, dtype=dtype, device=device)
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, 1e-5, out=out, with_pdl=pdl.supported(device))
    assert_close(out, rms_norm_reference(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "k"), SIZES)
def test_inverse_rms(tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x = draw(tokens, k, dtype=dtype, device=device)
    out = torch.full((tokens,), float("nan"), device=device)
    inverse_rms(x, 1e-5, out=out, with_pdl=pdl.supported(device))
    assert_close(out, inverse_rms_reference(x, 1e-5), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "k"), SIZES)
def test_add_and_norm(tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = draw(tokens, k, dtype=dtype, device=device), draw(k, dtype=dtype, device=device)
    ours = draw(tokens, k, dtype=dtype, device=device)
    theirs = ours.clone()
    rms_norm(x, weight, 1e-5, residual=ours, out=x, with_pdl=pdl.supported(device))
    # x was overwritten by the norm: what was added is what the stream gained
    added = (ours.double() - theirs.double()).to(dtype)
    assert_close(x, rms_norm_reference(added, weight, 1e-5, residual=theirs), dtype)
    assert_close(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_the_sum_is_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = draw(4, 96, dtype=dtype, device=device), draw(4, 96, dtype=dtype, device=device)
    total = (x.double() + residual.double()).to(dtype)
    rms_norm(x, torch.ones(96, dtype=dtype, device=device), 1e-6, residual=residual)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "k"), SIZES)
def test_norm_add(tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x, y = (draw(tokens, k, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(k, device=device)  # Gemma's are float32
    expected = norm_add_reference(x, y, weight, 1e-6)
    assert norm_add(x, y, weight, 1e-6, with_pdl=pdl.supported(device)) is x
    assert_close(x, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize(("tokens", "k"), SIZES)
def test_layer_norm(
    tokens: int, k: int, biased: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = draw(tokens, k, dtype=dtype, device=device) + 3
    weight, shift = (draw(k, dtype=dtype, device=device) for _ in range(2))
    bias = shift if biased else None
    out = torch.full_like(x, float("nan"))
    layer_norm(x, weight, bias, 1e-5, out=out, with_pdl=pdl.supported(device))
    assert_close(out, layer_norm_reference(x, weight, bias, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "given",
    [(), ("bias",), ("norms",), ("scale", "bias", "norms"), ("rms_of", "bias", "norms")],
    ids="+".join,
)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "d"),
    [(1, 2, 1, 16), (7, 3, 3, 12), (5, 8, 2, 64), pytest.param(8192, 40, 8, 128, marks=LARGE)],
)
def test_rotary_write(
    tokens: int,
    heads: int,
    kv_heads: int,
    d: int,
    given: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    width = (heads + 2 * kv_heads) * d
    qkv = draw(tokens, width, dtype=dtype, device=device)
    every = {
        "scale": torch.rand(tokens, device=device),
        "rms_of": (draw(tokens, 24, dtype=dtype, device=device), 1e-6),
        "bias": draw(width, dtype=dtype, device=device),
        "norms": (*(draw(d, dtype=dtype, device=device) for _ in range(2)), 1e-6),
    }
    more: dict[str, Any] = {name: every[name] for name in given}
    ours, theirs = (paged(tokens, kv_heads, d, dtype, device) for _ in range(2))
    args = (ours.columns, ours.cos, ours.sin)
    out = torch.full((tokens, heads, d), float("nan"), dtype=dtype, device=device)
    with_pdl = pdl.supported(device)
    rotary_write(qkv, *args, ours.k, ours.v, heads, out=out, with_pdl=with_pdl, **more)
    expected = rotary_write_reference(qkv, *args, theirs.k, theirs.v, heads, **more)
    assert_close(out, expected, dtype)
    for mine, reference in ((ours.k, theirs.k), (ours.v, theirs.v)):
        places = written(reference)
        assert places.any()
        assert torch.equal(written(mine), places)
        assert_close(mine[places], reference[places], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{"turned": False, "clip": 0.7}, {"by_token": True}, {"own": False}, {"v_eps": 1e-6}],
    ids=["clipped", "by-token", "q-alone", "v-normed"],
)
def test_other_rotary_writes(
    changes: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Without a turn; by rows of the step's tokens; of a layer that reads another's K and V;
    with v normed."""
    tokens, heads, kv_heads, d = 7, 3, 3, 12
    own = changes.get("own", True)
    width = (heads + 2 * kv_heads * own) * d
    qkv = draw(tokens, width, dtype=dtype, device=device)
    norms = (*(torch.randn(d, device=device) for _ in range(2)), 1e-6)
    bias = draw(width, dtype=dtype, device=device)
    ours, theirs = (paged(tokens, kv_heads, d, dtype, device) for _ in range(2))
    args = (ours.columns, ours.cos, ours.sin)
    out = torch.full((tokens, heads, d), float("nan"), dtype=dtype, device=device)
    more: dict[str, Any] = {"bias": bias, "norms": norms, **changes}
    rotary_write(qkv, *args, ours.k, ours.v, heads, out=out, **more)
    assert_close(out, rotary_write_reference(qkv, *args, theirs.k, theirs.v, heads, **more), dtype)
    for mine, reference in ((ours.k, theirs.k), (ours.v, theirs.v)):
        places = written(reference)
        assert places.any() == own
        assert torch.equal(written(mine), places)
        assert_close(mine[places], reference[places], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "k"), SIZES)
def test_begin(tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    columns = paged(tokens, 1, 2, dtype, device).columns
    spare = columns.tables.shape[0] - 1
    columns.positions.sub_(1)
    columns.rows[tokens // 2 :: 3] = spare
    columns.positions[tokens // 2 :: 3] = 0
    columns.writes[tokens // 2 :: 3] = 0
    embedding = draw(37, k, dtype=dtype, device=device)
    last = torch.randint(37, (spare + 1,), dtype=torch.int32).to(device)
    ids = torch.randint(-20, 37, (tokens,), dtype=torch.int32).clamp(min=-1).to(device)
    x = torch.full((tokens, k), float("nan"), dtype=dtype, device=device)
    theirs = dataclasses.replace(columns, positions=columns.positions.clone())
    their_ids, their_x = ids.clone(), x.clone()
    slots = torch.full((tokens * 3 + 1, 4), -7, dtype=torch.int32, device=device)
    their_slots = slots.clone()
    begin(ids, last, embedding, columns, slots, x, with_pdl=pdl.supported(device))
    begin_reference(their_ids, last, embedding, theirs, their_slots, their_x)
    assert torch.equal(slots, their_slots)
    assert int((slots != -7).sum()) == int(columns.writes.sum())
    assert torch.equal(x, their_x)
    assert torch.equal(columns.positions, theirs.positions)
    assert torch.equal(ids, their_ids)
    columns.writes.zero_()
    begin(ids, last, embedding, columns, slots, x)  # the host said nothing: the newest draws
    assert torch.equal(x, embedding[last[columns.rows.long()].long()])
    assert not columns.positions[columns.rows == spare].any()
    assert torch.equal(slots, their_slots), "an unwritten token left its id"


def test_no_tokens_no_launch(device: torch.device) -> None:
    empty = torch.empty(0, 8, device=device)
    assert rms_norm(empty, torch.ones(8, device=device), 1e-6).shape == (0, 8)
    assert layer_norm(empty, torch.ones(8, device=device), None, 1e-6).shape == (0, 8)
    assert activation(empty).shape == (0, 4)
    assert cap_rows(empty, 5.0).shape == (0, 8)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_begin_scales_and_adds_learned_positions(dtype: torch.dtype, device: torch.device) -> None:
    columns = paged(6, 1, 2, dtype, device).columns
    columns.positions.sub_(1)
    columns.writes.zero_()
    columns.rows[2] = columns.tables.shape[0] - 1
    embedding, learned = (draw(n, 53, dtype=dtype, device=device) for n in (37, 5))
    last, with_pdl = torch.arange(7, dtype=torch.int32, device=device), pdl.supported(device)
    slots = torch.zeros((19, 4), dtype=torch.int32, device=device)
    for more in ({"scale": 53**0.5}, {"learned": learned}, {"scale": 0.3, "learned": learned}):
        ids = torch.arange(6, dtype=torch.int32, device=device)
        x = torch.full((6, 53), float("nan"), dtype=dtype, device=device)
        ours, theirs = (
            dataclasses.replace(columns, positions=columns.positions.clone()) for _ in range(2)
        )
        expected = x.clone()
        args: dict[str, Any] = dict(more)
        kept, its_kept = ids - 1, ids - 1
        begin_reference(ids - 3, last, embedding, theirs, slots, expected, kept=its_kept, **args)
        ids -= 3  # some are the newest draws of their rows
        begin(ids, last, embedding, ours, slots, x, kept=kept, with_pdl=with_pdl, **args)
        # A card rounds a product and a sum once, not twice.
        rounded = 2e-7 if len(more) == 2 and dtype == torch.float32 else 0.0
        torch.testing.assert_close(x, expected, rtol=rounded, atol=rounded)
        assert torch.equal(kept, its_kept)

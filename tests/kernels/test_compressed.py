"""Compressed matrices: the same numbers, bit for bit, and the products of experts with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.cuda.mixture import Mixture, copies_of
from headrace.kernels import compressed, pdl
from headrace.kernels.compressed import COLUMNS, ROWS, SLOTS, compress, compressible, restore
from headrace.kernels.compressed_experts import (
    compressed_down,
    compressed_gate_up,
)
from headrace.kernels.dispatch import DispatchScratch, route_and_dispatch
from headrace.kernels.experts import combine, experts_reference
from headrace.kernels.launch import launch
from headrace.kernels.product import Workspace
from headrace.kernels.router import Routing
from headrace.models.routed import RoutedMlp
from headrace.models.spec import Experts, LayerSpec, ModelSpec, Rope
from tests.kernels.conftest import CUDA, assert_close

BF16, ANY = torch.bfloat16, 1.0  # ANY number of escapes
SPEC = ModelSpec(
    architecture="Qwen3MoeForCausalLM",
    layers=2,
    hidden=COLUMNS,
    heads=2,
    kv_heads=1,
    head_dim=16,
    ffn=COLUMNS,
    vocab_rows=50,
    vocab_size=49,
    rope=Rope(),
    norm_eps=1e-5,
    tied=True,
    qkv_bias=False,
    max_positions=256,
    kinds=(LayerSpec(mlp="experts"),) * 2,
    experts=Experts(count=2, chosen=2, ffn=COLUMNS),
)
DTYPES = [BF16, torch.float32]


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


@pytest.mark.parametrize("at_once", [1, 2 << 16, 1 << 28])
@pytest.mark.parametrize("experts", [1, 3])
def test_every_number_there_is(
    experts: int, at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 65536, NaN, infinities, zeros and the least of all among them, in slices of one matrix or
    more."""
    monkeypatch.setattr(compressed, "_AT_ONCE", at_once)
    rng = torch.Generator().manual_seed(experts)
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    mixed = torch.stack([every[torch.randperm(1 << 16, generator=rng)] for _ in range(experts)])
    weight = mixed.view(experts, 4 * ROWS, 2 * COLUMNS).to(device).view(BF16)
    made = compress(weight, most_escapes=ANY)
    assert made is not None
    assert made.shape == tuple(weight.shape)
    assert torch.equal(bits(restore(made)), bits(weight))
    paired = compress(weight, paired=True, most_escapes=ANY)
    assert paired is not None
    pairs = restore(paired).view(experts, 2 * ROWS, 2, 2 * COLUMNS).transpose(1, 2)
    assert torch.equal(bits(pairs.reshape(weight.shape)), bits(weight))


@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_any_spread_of_exponents(data: st.DataObject) -> None:
    """The window holds the most usual 16; whatever else there is comes back too."""
    seed = data.draw(st.integers(0, 1 << 16))
    spread, shift = data.draw(st.floats(0.0, 60.0)), data.draw(st.integers(-100, 100))
    rng = torch.Generator().manual_seed(seed)
    size = (2, ROWS, COLUMNS)
    weight = torch.randn(size, generator=rng) * torch.exp2(
        torch.randn(size, generator=rng) * spread + shift
    )
    weight = weight.to(BF16).to("cuda" if CUDA else "cpu")
    made = compress(weight, most_escapes=ANY)
    assert made is not None
    assert torch.equal(bits(restore(made)), bits(weight))


def test_a_few_escapes_in_a_drawn_matrix(device: torch.device) -> None:
    rng = torch.Generator().manual_seed(3)
    weight = (torch.randn(2, 4 * ROWS, 4 * COLUMNS, generator=rng) * 0.02).to(BF16).to(device)
    made = compress(weight)
    assert made is not None
    assert torch.equal(bits(restore(made)), bits(weight))
    assert 0 < (made.slots >= 0).sum() < weight.numel() / 4000
    assert compressed.size_bytes(weight.numel()) <= made.size_bytes
    assert made.size_bytes < compressed.size_bytes(weight.numel()) * 1.01


def test_too_many_escapes(device: torch.device) -> None:
    weight = torch.ones(1, ROWS, COLUMNS, dtype=BF16, device=device)
    most = math.floor(weight.numel() * compressed.MOST_ESCAPES)
    weight.view(-1)[:most] = 0.0
    assert compress(weight) is not None
    weight.view(-1)[most] = 0.0
    assert compress(weight) is None


def test_gives_up_at_the_first_slice_that_has_too_many(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places take eight times the bytes of what they are places in."""
    launched: list[Any] = []

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel)
        launch(kernel, *args, **options)

    monkeypatch.setattr(compressed, "_AT_ONCE", ROWS * COLUMNS)
    monkeypatch.setattr(compressed, "launch", noted)
    weight = torch.zeros(3, ROWS, COLUMNS, dtype=BF16, device=device)
    assert compress(weight) is None
    assert len(launched) == 1


def test_too_many_escapes_of_one_group(device: torch.device) -> None:
    """Few of all, but one program would look for them long after the others have ended."""
    weight = torch.ones(2, 16 * ROWS, 4 * COLUMNS, dtype=BF16, device=device)
    most = math.floor(4 * ROWS * 4 * COLUMNS * compressed.MOST_ESCAPES)
    weight[1, 70].view(-1)[:most] = 0.0
    assert compress(weight) is not None
    weight[1, 70].view(-1)[most] = 0.0
    assert compress(weight) is None


def test_gate_and_up_have_one_base(device: torch.device) -> None:
    """It suits both, though up's numbers are four times as large."""
    rng = torch.Generator().manual_seed(5)
    weight = torch.randn(2, 8 * ROWS, 4 * COLUMNS, generator=rng) * 0.02
    weight[:, 4 * ROWS :] *= 4
    assert compress(weight.to(BF16).to(device), paired=True) is not None


def test_shapes() -> None:
    assert compressible(3 * ROWS, COLUMNS)
    assert not compressible(ROWS + 1, COLUMNS)
    assert not compressible(ROWS, COLUMNS // 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [0.0, 0.8], ids=["plain", "clamped"])
@pytest.mark.parametrize("tile_rows", [16, 32])
def test_layer(tile_rows: int, limit: float, dtype: torch.dtype, device: torch.device) -> None:
    """As `test_experts.test_layer`, from compressed matrices: some with zeros, far numbers, and
    more escapes in a group than it has slots."""
    tokens, hidden, ffn, routing = 9, COLUMNS, COLUMNS, Routing(3, 2, shared=1)
    rng = torch.Generator().manual_seed(7)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng) * scale).to(BF16).to(device)

    x = draw(tokens, hidden).to(dtype)
    gate_up = draw(routing.total, 2 * ffn, hidden, scale=hidden**-0.5)
    down = draw(routing.total, hidden, ffn, scale=ffn**-0.5)
    gate_up[0, 5, :] = 0.0
    gate_up[1, ffn + 7, ::3] = 1e-30
    down[2, 3, 8 : 8 + SLOTS + 1] = -(2.0**-20)
    down[0, hidden - 1, ffn - 1] = 3.0
    biases = (draw(routing.total, 2 * ffn), draw(routing.total, hidden)) if limit else None
    rows = torch.arange(tokens, dtype=torch.int32, device=device)
    spare = tokens - 1
    x[spare] = torch.nan
    plan = DispatchScratch(tokens, routing, device).of(tokens, tile_rows)
    logits = torch.randn(tokens, routing.experts, generator=rng).to(device)
    with_pdl = pdl.supported(device)
    route_and_dispatch(logits, routing, plan, rows=rows, spare=spare, with_pdl=with_pdl)
    made_up = compress(gate_up, paired=True, most_escapes=ANY)
    made_down = compress(down, most_escapes=ANY)
    assert made_up is not None
    assert made_down is not None
    assert min(len(made_up.places), len(made_down.places)) > 0, "none is beyond the slots"

    items = tokens * routing.each
    inner = torch.full((items, ffn), torch.nan, dtype=dtype, device=device)
    y = torch.full((items, hidden), torch.nan, dtype=dtype, device=device)
    bias_up, bias_down = biases if biases is not None else (None, None)
    options: dict[str, Any] = {"with_pdl": with_pdl}
    compressed_gate_up(x, made_up, plan, bias=bias_up, limit=limit, out=inner, **options)
    compressed_down(inner, made_down, plan, bias=bias_down, out=y, **options)
    reference = experts_reference(
        x, gate_up, down, plan.experts, plan.weights, biases=biases, limit=limit
    )
    out = torch.full((tokens, hidden), torch.nan, dtype=dtype, device=device)
    combine(y, plan, out=out, **options)
    assert_close(out[:spare], reference[:spare], dtype)
    assert not out[spare].any(), "padding gets nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("exponent", [-126, 0, 81, 107])
def test_ends_of_the_range(exponent: int, dtype: torch.dtype, device: torch.device) -> None:
    """Numbers of 20 exponents from this one on: more than a base has, from the least base to the
    largest and beyond. What is infinite or NaN is so for its own row of the matrix alone."""
    tokens, routing = 3, Routing(2, 2)
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(2 * tokens, COLUMNS, generator=rng) * 2.0 ** -(exponent // 2)
    x = x.to(dtype).to(device)
    size = (2, ROWS, COLUMNS)
    sizes = torch.exp2(torch.randint(exponent, exponent + 20, size, generator=rng).double())
    weight = (torch.rand(size, generator=rng) + 1) * sizes * torch.randn(size, generator=rng).sign()
    weight = weight.to(BF16).to(device)
    weight[0, 3, 5], weight[1, 40, 7] = torch.inf, torch.nan
    made = compress(weight, most_escapes=ANY)
    assert made is not None
    assert torch.equal(bits(restore(made)), bits(weight))
    assert not (made.scales.view(torch.int32) & 0x7FFFFF).any(), "powers of two"
    plan = DispatchScratch(tokens, routing, device).of(tokens, 16)
    logits = torch.randn(tokens, 2, generator=rng).to(device)
    rows = torch.arange(tokens, dtype=torch.int32, device=device)
    with_pdl = pdl.supported(device)
    route_and_dispatch(logits, routing, plan, rows=rows, spare=tokens, with_pdl=with_pdl)
    y = torch.full((2 * tokens, ROWS), torch.nan, dtype=dtype, device=device)
    compressed_down(x, made, plan, out=y, with_pdl=with_pdl)
    experts = plan.experts.view(-1).long()
    exact = torch.einsum("ank,ak->an", weight[experts].double(), x.double())
    broken = ~exact.isfinite()
    assert torch.equal(broken, ~y.isfinite())
    assert torch.equal(y[broken].isnan(), exact[broken].isnan())
    assert_close(y.where(~broken, 0.0), exact.where(~broken, 0.0), dtype)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_mixture_reads_copies_where_tokens_are_few(tokens: int, device: torch.device) -> None:
    """`copies` change no result: here they are of another layer, so that it shows who reads
    them."""
    dtype = DTYPES[-1]
    rng = torch.Generator().manual_seed(1)

    def layer() -> RoutedMlp:
        mlp = RoutedMlp(SPEC, BF16)
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * COLUMNS**-0.5)
        return mlp.to(device)

    one, other = layer(), layer()
    mixture = Mixture(SPEC, 64, dtype, device)
    x = torch.randn(tokens, COLUMNS, generator=rng).to(dtype).to(device)
    rows = torch.zeros(tokens, dtype=torch.int32, device=device)

    def added() -> torch.Tensor:
        mlp = one.to(dtype)
        out = mixture.add(
            0, x.clone(), x, mlp, rows, 1, Workspace(device), with_pdl=pdl.supported(device)
        )
        return out.clone()

    plain = added()
    copies = copies_of(one.to(BF16))
    assert copies is not None
    mixture.copies[0] = copies
    assert_close(added(), plain.double(), dtype)
    wrong = copies_of(other)
    assert wrong is not None
    mixture.copies[0] = wrong
    assert torch.equal(added(), plain) == (tokens != 3)  # one token, or tiles of 64 rows

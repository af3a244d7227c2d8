"""Kernels between Gemma 3n's products against the model's own torch, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import altup, pdl, streams
from headrace.models import altup as plain
from headrace.models.altup import AltUpBlock
from headrace.models.spec import from_hf
from tests.kernels.conftest import assert_close
from tests.kernels.test_elementwise import DTYPES, draw

HIDDEN, WIDTH, STREAMS, ACTIVE = 53, 9, 3, 1
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 1,
    "intermediate_size": 8, "vocab_size": 40, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 16, "num_kv_shared_layers": 0, "layer_types": ["full_attention"],
    "altup_num_inputs": STREAMS, "altup_active_idx": ACTIVE, "hidden_size_per_layer_input": WIDTH,
    "laurel_rank": 4, "activation_sparsity_pattern": 0.0,
}  # fmt: skip
TOKENS = pytest.mark.parametrize("tokens", [1, 3])
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def blocks(dtype: torch.dtype, device: torch.device, scaled: bool) -> tuple[AltUpBlock, AltUpBlock]:
    """A random layer, and the same in float64."""
    spec = from_hf(CONFIG | {"altup_correct_scale": scaled})
    block = AltUpBlock(spec, 0, dtype).to(device)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape).to(parameter.dtype).to(device)
    block.layer_gate.weight.mul_(0.1)  # the interpreter warns where exp is infinite
    return block, copy.deepcopy(block).double()


def streams_of(tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return draw(tokens, STREAMS, HIDDEN, dtype=dtype, device=device)


@EVERY_DTYPE
@TOKENS
def test_predict(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    block, wide = blocks(dtype, device, scaled=True)
    before, norm = streams_of(tokens, dtype, device), block.router_norm
    gain, weights = (norm.weight, norm.eps), (block.router.weight, block.predictions.weight)
    out, x = altup.predict(before, gain, *weights, ACTIVE, with_pdl=pdl.supported(device))
    expected, _ = wide.predicted(before.double())
    assert_close(out, expected, dtype)
    if dtype == torch.float32:  # what is added is small
        assert_close(out - before, expected - before.double(), torch.float16)
    assert torch.equal(x, out[:, ACTIVE])


@EVERY_DTYPE
@TOKENS
def test_residual(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    block, wide = blocks(dtype, device, scaled=True)
    x, norm = draw(tokens, HIDDEN, dtype=dtype, device=device), block.laurel_norm
    normed = block.attn_norm(x)
    low = block.laurel_right(block.laurel_left(normed))
    gain, with_pdl = (norm.weight, norm.eps), pdl.supported(device)
    out = altup.residual(normed, low, gain, 0.5**0.5, with_pdl=with_pdl)
    assert_close(out, wide.residual(x.double()), dtype)


@EVERY_DTYPE
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@TOKENS
def test_correct(tokens: int, scaled: bool, dtype: torch.dtype, device: torch.device) -> None:
    """All of it, with inputs that are columns of something wider."""
    block, wide = blocks(dtype, device, scaled)
    before, x = streams_of(tokens, dtype, device), draw(tokens, HIDDEN, dtype=dtype, device=device)
    inputs = draw(tokens, 2, WIDTH, dtype=dtype, device=device)[:, 1]
    scale, with_pdl = block.scale if scaled else None, pdl.supported(device)
    norm, last = ((of.weight, of.eps) for of in (block.router_norm, block.layer_norm))
    weights = block.router.weight, block.corrections.weight
    out, first = altup.correct(before, x, norm, *weights, scale, ACTIVE, with_pdl=with_pdl)
    gate = block.layer_gate(first)
    altup.gate_inputs(gate, inputs, block.ffn.act, with_pdl=with_pdl)
    own = block.layer_out(gate)
    altup.add_to_others(out, own, last, with_pdl=with_pdl)
    expected = wide.corrected(before.double(), x.double(), inputs.double())
    assert_close(out, expected, dtype)
    assert_close(out[:, 0], expected[:, 0], dtype)


def test_no_tokens(device: torch.device) -> None:
    block, _ = blocks(torch.float32, device, scaled=True)
    none, norm = streams_of(0, torch.float32, device), (block.router_norm.weight, 1e-6)
    out, x = altup.predict(none, norm, block.router.weight, block.predictions.weight, ACTIVE)
    assert out.shape == (0, STREAMS, HIDDEN)
    assert x.shape == (0, HIDDEN)


@EVERY_DTYPE
@TOKENS
def test_spread_and_gather(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """One of the others is next to nothing, and stays small."""
    x = draw(tokens, HIDDEN, dtype=dtype, device=device)
    weights = list(draw(STREAMS - 1, HIDDEN, HIDDEN, dtype=dtype, device=device) / 8)
    weights[1] *= 1e-4
    wide, with_pdl = [weight.double() for weight in weights], pdl.supported(device)
    others = torch.stack([x @ weight.t() for weight in weights])
    out = streams.spread(x, others, with_pdl=with_pdl)
    assert_close(out, plain.spread(wide, x.double()), dtype)
    rms = out.float().square().mean(-1).sqrt()
    assert bool((rms[:, 2] < rms[:, 0] / 2).all())
    back = torch.stack([out[:, i + 1] @ weight.t() for i, weight in enumerate(weights)])
    mean = torch.full_like(x, float("nan"))
    streams.gather(out[:, 0], back, out=mean, with_pdl=with_pdl)
    assert_close(mean, plain.gather(wide, out.double()), dtype)

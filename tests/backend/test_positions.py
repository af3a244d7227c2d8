"""Rotary embedding of every kind against transformers' own functions; orders of rows; slopes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from headrace.models.hf_rope import rope_of
from headrace.models.positions import Rotary, rotate
from headrace.models.rope import alibi_slopes, frequencies_by_length, inverse_frequencies, turns
from headrace.models.slots import head_order
from headrace.models.spec import Rope
from headrace.runner.pieces import ordered

HEAD_DIM = 32
BASE: dict[str, Any] = {"rope_theta": 50000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 16 for i in range(16)],
    "long_factor": [2 + i / 2 for i in range(16)],
    "original_max_position_embeddings": 64,
}
YARN = BASE | {"rope_type": "yarn", "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": BASE | {"rope_type": "linear"},
    "dynamic": BASE | {"rope_type": "dynamic"},
    "llama3": BASE
    | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn-bounds": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    "yarn-deepseek": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-as-set": YARN | {"attention_factor": 1.3},
    "longrope": BASE | LONG,
    "longrope-ratio": {"rope_theta": 50000.0} | LONG,
    "partial": YARN | {"partial_rotary_factor": 0.5},
}


BY_LENGTH = ("dynamic", "longrope", "longrope-ratio")


@pytest.mark.parametrize("name", list(SCALINGS))
@pytest.mark.parametrize("length", [1, 64, 65, 200])
def test_frequencies_are_transformers(name: str, length: int) -> None:
    scaling = SCALINGS[name]
    positions = 64 if name == "dynamic" else 256
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=positions,
        rope_parameters=dict(scaling),
    )
    find = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    wanted, magnitude = find(config, None, seq_len=length)
    ours: dict[str, Any] = {"rope_parameters": scaling, "max_position_embeddings": positions}
    rope, served = rope_of(ours, HEAD_DIM)
    got = torch.from_numpy(inverse_frequencies(rope, rope.dims or HEAD_DIM, length))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)
    assert served == 256


def test_a_part_of_the_head_turns() -> None:
    """As if the first half of each head were a head of its own, and the rest were not turned."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 16, generator=draw)
    positions = torch.arange(7)
    small = Rotary(Rope(), 8)
    parts = rotate(x[..., :8], *small(positions, torch.float32))
    wanted = torch.cat((parts, x[..., 8:]), -1)
    order = head_order(16, 8)
    rotary = Rotary(Rope(dims=8, magnitude=1.0), 16)
    got = rotate(x[..., list(order)], *rotary(positions, torch.float32))
    torch.testing.assert_close(got, wanted[..., list(order)])


@pytest.mark.parametrize("name", list(SCALINGS))
def test_every_length_at_once(name: str) -> None:
    ours: dict[str, Any] = {"rope_parameters": SCALINGS[name], "max_position_embeddings": 64}
    rope, _ = rope_of(ours, HEAD_DIM)
    dims = rope.dims or HEAD_DIM
    each = [inverse_frequencies(rope, dims, length) for length in (3, 64, 65, 200)]
    assert (frequencies_by_length(rope, dims, (3, 64, 65, 200)) == each).all()


@pytest.mark.parametrize("name", [name for name in SCALINGS if name not in BY_LENGTH])
def test_the_table_is_what_torch_turns_by(name: str) -> None:
    """With a checkpoint's factors, and a part of the head still; all but the last bit."""
    ours: dict[str, Any] = {"rope_parameters": SCALINGS[name], "max_position_embeddings": 256}
    rope, _ = rope_of(ours, HEAD_DIM)
    rotary = Rotary(rope, HEAD_DIM)
    factors = torch.linspace(1, 4, (rope.dims or HEAD_DIM) // 2)
    for given_factors in (None, factors):
        rotary.factors = None
        if given_factors is not None:
            rotary.factors = torch.nn.Parameter(given_factors, requires_grad=False)
        wanted = rotary(torch.arange(300), torch.float32)
        numbers = None if given_factors is None else given_factors.numpy()
        for table, angles in zip(turns(rope, HEAD_DIM, 300, numbers), wanted, strict=True):
            np.testing.assert_allclose(table, angles[:, 0].numpy(), rtol=0, atol=3e-7)


def test_what_does_not_turn_does_not_grow() -> None:
    cos, sin = Rotary(Rope(dims=8, magnitude=2.0), 16)(torch.arange(3), torch.float32)
    assert torch.equal(cos[:, 0, 4:], torch.ones(3, 4))
    assert torch.equal(sin[:, 0, 4:], torch.zeros(3, 4))
    assert torch.equal(cos[0, 0, :4], torch.full((4,), 2.0))


def test_neighbours_turn_as_pairs() -> None:
    """Rows whose pairs are neighbours (GPT-J's layout), put into halves, give the same scores."""
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 5, 1, 8, generator=draw).unbind(0)
    positions = torch.arange(5)
    cos, sin = Rotary(Rope(), 8)(positions, torch.float32)

    def turned(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        both = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return both.flatten(-2)

    wanted = torch.einsum("qhd,khd->qk", turned(q), turned(k))
    order = list(head_order(8, paired=True))
    ours = (rotate(x[..., order], cos, sin) for x in (q, k))
    torch.testing.assert_close(torch.einsum("qhd,khd->qk", *ours), wanted)


@given(pairs=st.integers(1, 12), turned=st.integers(0, 12), paired=st.booleans())
def test_orders_are_permutations(pairs: int, turned: int, paired: bool) -> None:
    order = head_order(2 * pairs, 2 * min(turned, pairs), paired=paired)
    assert sorted(order) in ([], list(range(2 * pairs)))
    rows = torch.arange(4 * pairs)
    back = ordered(ordered(rows, order), tuple(int(i) for i in torch.tensor(order).argsort()))
    assert torch.equal(back, rows)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 40])
def test_slopes_are_those_of_mpt(heads: int) -> None:
    steps = build_mpt_alibi_tensor(heads, 2)  # [heads, 1, 2]: one token of distance
    assert alibi_slopes(heads, 8.0) == pytest.approx((-steps[:, 0, 0]).tolist())

"""Tokens drawn on the device are those of `sampling.pipeline`, each row's its own."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import draw_params
from headrace.kernels.draw_params import Kind, kind_of, pack
from headrace.kernels.sampling import Scratch, sample
from headrace.messages import Sampling
from headrace.sampling import params as host_params
from headrace.sampling.params import Columns
from headrace.sampling.pipeline import STAGES, inverse_cdf, run_stages
from headrace.sampling.rng import uniform, uniform_reference
from tests.kernels.conftest import CUDA
from tests.kernels.probes import keys_kernel, uniform_kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda" if CUDA else "cpu")
NEAR = 1e-6  # what `kernels.sampling` promises
EXAMPLES = 40 if CUDA else 5
VOCAB = 152064 if CUDA else 700
CHUNK = 4096 if CUDA else 256


@dataclasses.dataclass(frozen=True)
class Drawn:
    tokens: list[int]
    last: list[int]


def draw(
    logits: Tensor,
    rows: list[Sampling],
    positions: list[int],
    kind: Kind = "full",
    *,
    first_choice: int = 0,
    sample_size: int = 1024 if CUDA else 64,
    candidates: int = 32768,
    few_sizes: tuple[int, int, int] = (64, 1024, 4096),
) -> Drawn:
    """Draw j by device row 2 j + 1 and token (D - 1 - j), so that no index can be mixed up."""
    draws, vocab = logits.shape
    params = torch.full((2 * draws + 1, 8), -1, dtype=torch.int32)
    for j, sampling in enumerate(rows):
        params[2 * j + 1] = torch.tensor(pack(sampling, first_choice + j), dtype=torch.int32)
    column = torch.tensor([p - 1 for p in reversed(positions)], dtype=torch.int32, device=DEVICE)
    last = torch.full((2 * draws + 1,), -77, dtype=torch.int32, device=DEVICE)
    tokens = torch.full((draws + 1,), -99, dtype=torch.int32, device=DEVICE)
    group, held, few_room = few_sizes
    scratch = Scratch.allocate(
        draws + 3, vocab, DEVICE, chunk=CHUNK, sample=sample_size, candidates=candidates,
        group=group, held=held, few_room=few_room,
    )  # fmt: skip
    for field in dataclasses.fields(scratch):
        value = getattr(scratch, field.name)
        if isinstance(value, Tensor):
            value.fill_(float("nan") if value.is_floating_point() else -12345)
    numbers = torch.arange(draws, dtype=torch.int32)
    sample(
        logits.to(DEVICE),
        numbers.to(DEVICE),
        params.to(DEVICE),
        column,
        numbers.flip(0).contiguous().to(DEVICE),
        (2 * numbers + 1).to(DEVICE),
        last,
        tokens[:draws],
        kind=kind,
        scratch=scratch,
    )
    assert int(tokens[draws]) == -99
    assert (last[::2] == -77).all(), "rows without a draw keep what they had"
    return Drawn(tokens[:draws].tolist(), last[1::2].tolist())


def acceptable(
    logits: Tensor, sampling: Sampling, choice: int, position: int, moves: tuple[float, ...]
) -> set[int]:
    """The pipeline's tokens with u, top-p and min-p moved by so much."""
    z = logits.float().cpu().numpy()[None]
    if sampling.temperature < host_params.GREEDY_BELOW:
        return {int(z.argmax())}
    seed, which, at = (np.array([n], np.uint64) for n in (sampling.seed, choice, position))
    u = float(uniform(seed, which, at)[0])
    found = set()
    for du, dp in itertools.product(moves, repeat=2):
        near = Sampling(
            sampling.temperature,
            sampling.top_k,
            sampling.top_p + dp if sampling.top_p < 1.0 else 1.0,
            sampling.min_p * (1 + dp) if sampling.min_p < 1.0 else 1.0,
        )
        kept = run_stages(z.astype(np.float64), Columns.of([(near, 0, 0)]), STAGES)
        moved = np.array([min(max(u + du, 0.0), 1 - 1e-12)])
        found.add(int(inverse_cdf(kept, moved)[0]))
    return found


def check_row(logits: Tensor, sampling: Sampling, token: int, choice: int, position: int) -> None:
    """The pipeline's token, or one across a boundary nearer than what is promised."""
    if token not in acceptable(logits, sampling, choice, position, (0.0,)):
        near = acceptable(logits, sampling, choice, position, (-NEAR, 0.0, NEAR))
        assert token in near, f"row {choice}: {token} not {near}: {sampling}"


def check(logits: Tensor, rows: list[Sampling], drawn: Drawn, positions: list[int]) -> None:
    assert drawn.tokens == drawn.last
    for j, sampling in enumerate(rows):
        check_row(logits[j], sampling, drawn.tokens[j], j, positions[j])


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 0.7, 1.0, 2.0, 1000.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 20, VOCAB - 1, VOCAB, 2**40]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0)),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # the interpreter is too slow to shrink
)
@given(
    rows=st.lists(samplings, min_size=4, max_size=4),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    dtype=st.sampled_from(DTYPES),
    noise=st.integers(0, 2**32),
    start=st.integers(1, 2**31 - 8),
    sizes=st.sampled_from([(16, 32), (1024 if CUDA else 64, 32768)]),
)
def test_equals_the_pipeline(
    rows: list[Sampling],
    spread: float,
    dtype: torch.dtype,
    noise: int,
    start: int,
    sizes: tuple[int, int],
) -> None:
    """Small samples and little room for candidates: the search of whole rows is tested too."""
    maker = torch.Generator().manual_seed(noise)
    logits = (torch.randn(4, VOCAB, generator=maker) * spread).to(dtype)
    positions = [start + j for j in range(4)]
    drawn = draw(logits, rows, positions, sample_size=sizes[0], candidates=sizes[1])
    check(logits, rows, drawn, positions)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_at_the_edge(dtype: torch.dtype) -> None:
    """Logits of five values only: the lowest ids on an edge stay, over chunks."""
    logits = torch.randint(-2, 3, (8, VOCAB), generator=torch.Generator().manual_seed(3)).to(dtype)
    rows = [
        Sampling(top_k=3, seed=1),
        Sampling(top_k=VOCAB // 3, seed=2),
        Sampling(top_k=VOCAB // 3, top_p=0.3, seed=3),
        Sampling(top_p=0.4, seed=4),
        Sampling(top_p=0.9, temperature=3.0, seed=5),
        Sampling(min_p=1.0, seed=6),
        Sampling(top_p=0.25, min_p=0.3, seed=7),
        Sampling(temperature=0.0),
    ]
    positions = list(range(5, 13))
    check(logits, rows, draw(logits, rows, positions), positions)


@pytest.mark.parametrize("few_sizes", [(8, 1024, 1024), (64, 256, 1024), (64, 256, 256)])
@pytest.mark.parametrize("ties", [True, False])
def test_small_top_k(few_sizes: tuple[int, int, int], ties: bool) -> None:
    """Groups that name nearly the k largest; more candidates than a program holds; more than there
    is room for. With ties of more tokens than stay, all of them on one edge.
    """
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(7))
    logits = (logits * (0.4 if ties else 3.0)).bfloat16()
    logits = logits.round() if ties else logits
    logits[1, 5:] = float("-inf")
    logits[2, : VOCAB // 2] = float("-inf")
    rows = [
        Sampling(top_k=1, seed=1),
        Sampling(top_k=9, seed=2),
        Sampling(top_k=256, top_p=0.6, seed=3),
        Sampling(top_k=200, min_p=0.02, temperature=2.0, seed=4),
        Sampling(top_k=100, top_p=0.99, min_p=1.0, seed=5),
        Sampling(top_k=40, top_p=1e-9, seed=6),
    ]
    positions = list(range(9, 15))
    drawn = draw(logits, rows, positions, "few", few_sizes=few_sizes)
    check(logits, rows, drawn, positions)


def test_top_p_of_equal_tokens_counts_them_exactly() -> None:
    """Ten equal tokens and p = 0.3 leave three: p is kept to more than float32."""
    logits = torch.full((9, 10), 2.0)
    rows = [Sampling(top_p=0.3, seed=s) for s in range(9)]
    assert set(draw(logits, rows, [1] * 9).tokens) == {0, 1, 2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_cannot_be_drawn(dtype: torch.dtype) -> None:
    """NaN or +inf: -1 there; nothing finite: -2; and the others as if they were alone."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, VOCAB - 1] = float("nan")
    logits[2, 3] = float("inf")
    logits[4] = float("-inf")
    logits[5, 1:] = float("-inf")
    rows = [Sampling(seed=j, top_p=0.9) for j in range(6)]
    positions = list(range(1, 7))
    calls: list[tuple[Kind, list[Sampling]]] = [("full", rows)]
    calls.append(("greedy", [Sampling(temperature=0.0)] * 6))
    for kind, wanted in calls:
        drawn = draw(logits, wanted, positions, kind)
        assert [drawn.tokens[j] for j in (0, 2, 4)] == [-1, -1, -2]
        assert [drawn.last[j] for j in (0, 2, 4)] == [0, 0, 0]
        assert drawn.tokens[5] == 0
        for j in (1, 3):
            assert drawn.tokens[j] == drawn.last[j]
            check_row(logits[j], wanted[j], drawn.tokens[j], j, positions[j])


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((6, VOCAB), float("-inf"))
    allowed = [1, CHUNK - 1, CHUNK, VOCAB - 1]
    logits[:, allowed] = torch.tensor([0.0, 1.0, 0.5, 1.0])
    rows = [
        Sampling(seed=1),
        Sampling(seed=2, top_k=20),
        Sampling(seed=3, top_p=0.999999),
        Sampling(seed=4, temperature=1e30, top_k=VOCAB - 1),
        Sampling(seed=5, min_p=0.9),
        Sampling(temperature=0.0),
    ]
    positions = [10 * j + 1 for j in range(6)]
    drawn = draw(logits, rows, positions)
    assert set(drawn.tokens) <= set(allowed)
    check(logits, rows, drawn, positions)


def test_a_row_is_drawn_alike_alone_in_a_crowd_and_by_every_kind() -> None:
    maker = torch.Generator().manual_seed(9)
    logits = (torch.randn(6, VOCAB, generator=maker) * 2).bfloat16()
    rows = [Sampling(temperature=0.0), Sampling(seed=5), Sampling(seed=6, temperature=0.6)]
    rows += [Sampling(seed=7, top_p=0.8), Sampling(seed=8, top_k=9), Sampling(temperature=0.0)]
    kinds: list[list[Kind]] = [["greedy", "plain", "full"], ["plain", "full"], ["plain", "full"]]
    kinds += [["full"], ["few", "full"], ["greedy", "plain", "full"]]
    assert [kind_of(row) for row in rows] == [allowed[0] for allowed in kinds]
    crowd = draw(logits, rows, [3] * 6).tokens
    for j, allowed in enumerate(kinds):
        for kind in allowed:
            alone = draw(logits[j : j + 1], [rows[j]], [3], kind, first_choice=j).tokens
            assert alone == [crowd[j]], f"row {j}, {kind}"


def test_counts_follow_the_probabilities() -> None:
    """Chi-square over 5 tokens, 4 degrees of freedom: 18.5 is the 0.1 % point."""
    draws = 20000 if CUDA else 100
    probabilities = torch.arange(1.0, 6.0) / 15
    logits = probabilities.log().repeat(draws, 1)
    rows = [Sampling(seed=2026)] * draws
    tokens = draw(logits, rows, list(range(1, draws + 1)), "plain").tokens
    counts = np.bincount(tokens, minlength=5)
    expected = probabilities.numpy() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5


def test_uniform_is_the_host_s_bit_by_bit() -> None:
    words = np.random.default_rng(4).integers(0, 2**32, (40, 4)).astype(np.uint32)
    words[0] = 0
    words[1] = 2**32 - 1
    out = torch.full((40,), float("nan"), dtype=torch.float64, device=DEVICE)
    uniform_kernel[(40,)](torch.from_numpy(words.view(np.int32)).to(DEVICE), out)
    for (low, high, choice, position), u in zip(words.tolist(), out.tolist(), strict=True):
        assert u == uniform_reference(low | (high << 32), choice, position)


def test_keys_have_the_order_of_floats() -> None:
    values = [float("-inf"), -3e38, -1.0, -1e-38, -0.0, 0.0, 1e-38, 2.5, 3e38, float("inf")]
    z = torch.tensor([*values, *values[:6]], device=DEVICE)
    keys = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    back = torch.full((16,), float("nan"), device=DEVICE)
    keys_kernel[(1,)](z, keys, back, N=16)
    assert torch.equal(back, z)  # -0.0 == 0.0
    by_key, by_value = keys[:, None] < keys[None, :], z[:, None] < z[None, :]
    assert torch.equal(by_key, by_value)


def test_rows_of_the_table() -> None:
    seed = 0x89ABCDEF_01234567
    row = pack(Sampling(temperature=0.7, top_k=2**40, top_p=0.9, min_p=0.05, seed=seed), 2**32 - 1)
    bits = np.array(row, np.int32)
    floats = bits.view(np.float32)
    assert floats[0] == np.float32(0.7)
    assert row[1] == 2**31 - 1
    assert float(floats[2]) + float(floats[7]) == pytest.approx(0.9, abs=1e-15)
    assert floats[3] == np.float32(0.05)
    assert bits.view(np.uint32)[4:7].tolist() == [0x01234567, 0x89ABCDEF, 2**32 - 1]
    assert pack(Sampling(temperature=9e-6), 0)[0] == 0
    assert draw_params.GREEDY_BELOW == host_params.GREEDY_BELOW

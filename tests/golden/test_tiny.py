"""Tiny random models: tokens equal to transformers', alone, in chunks and among others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.choose import settled
from headrace.config import Settings
from headrace.messages import Join, StepPlan
from headrace.runner.build import load_runner
from headrace.runner.runner import TorchRunner
from tests.golden.reference import TINY, agree, greedy, tiny_model
from tests.golden.stepping import GREEDY, Job, generate, plan

SETTINGS = settled(
    Settings(
        backend="cpu", dtype="float32", kv_blocks=160, max_num_seqs=24, block_size=8, threads=1
    )
)
Pair = tuple[Any, TorchRunner]


@pytest.fixture(scope="module", params=list(TINY))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model, files = tiny_model(request.param, folder)
    runner, _ = load_runner(SETTINGS, files, lambda phase, seconds: None)
    yield model, runner
    runner.close()


def prompts(n: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(131) for _ in range(rng.randint(1, longest))] for _ in range(n)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1 << 30])
def test_greedy_equals_transformers(pair: Pair, chunk: int) -> None:
    model, runner = pair
    for prompt in [*prompts(3), list(range(16)), list(range(100, 108))]:  # whole blocks too
        expected = greedy(model, prompt, 12)
        (tokens,) = generate(runner, [Job(prompt, 12, chunk)])
        assert agree(tokens, expected) == 12, "fixed weights: no near-tie goes the other way"


def test_tokens_do_not_depend_on_neighbours(pair: Pair) -> None:
    _, runner = pair
    rng = random.Random(3)
    alone = [generate(runner, [Job(p, 10)])[0] for p in prompts(17)]
    jobs = [
        Job(p, 10, chunk=rng.choice([1, 7, 16, 64]), arrives=rng.randrange(8)) for p in prompts(17)
    ]
    assert generate(runner, jobs, shuffle_seed=5) == alone
    again = [Job(p, 10, arrives=rng.randrange(8)) for p in prompts(17)]
    assert generate(runner, again, on_device=False, shuffle_seed=6) == alone


def test_logits_are_close(pair: Pair) -> None:
    model, runner = pair
    (prompt,) = prompts(1)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
        logits, _ = runner.forward(_prefill(prompt))
    assert logits is not None
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)
    runner.forward(_leave())


def _prefill(prompt: list[int]) -> StepPlan:
    return plan(
        0,
        joins=[Join(0, GREEDY, 0, [list(range(-(-len(prompt) // 8)))])],
        rows=[0],
        starts=[0],
        counts=[len(prompt)],
        ids=[prompt],
        outputs=[1],
        draw_from=[0],
        draw_into=[0],
    )


def _leave() -> StepPlan:
    return plan(1, leaves=[0])

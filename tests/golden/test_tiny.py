"""Tiny random models: tokens equal to transformers', alone, in chunks and among others."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.protocol import Runner
from headrace.messages import Join, Sampling, StepPlan
from headrace.sources.files import ModelFiles
from tests.devices import PROCESSORS, WITHOUT_CUDA, load
from tests.golden.reference import TINY, agree, greedy, tiny_model
from tests.golden.stepping import GREEDY, Job, generate, plan

SETTINGS = {
    "dtype": "float32", "kv_blocks": 160, "max_num_seqs": 24, "block_size": 8, "threads": 1,
}  # fmt: skip
Pair = tuple[Any, Any]


@pytest.fixture(scope="module", params=list(TINY))
def pair(
    request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model, files = tiny_model(request.param, folder)
    runner = load(backend, files, **SETTINGS)
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


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])
def test_a_seeded_request_is_the_same_among_63_others(
    name: str, backend: str, tmp_path: Path
) -> None:
    _, files = tiny_model(name, tmp_path)
    a_crowd_changes_nothing(backend, files, n_tokens=24, vocab=131)


@pytest.mark.on_cuda
@pytest.mark.skipif(bool(WITHOUT_CUDA), reason=f"needs cuda: {WITHOUT_CUDA}")
def test_tables_are_filled_before_a_step_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the stream that fills them is late, and their memory held something else."""
    from headrace.runner import build_cuda

    forward_on = build_cuda.forward_on

    def late(*args: Any, **kwargs: Any) -> Any:
        waste = torch.full((1 << 28,), 0x7F7F7F7F, dtype=torch.int32, device="cuda")
        del waste
        torch.cuda._sleep(1 << 30)  # type: ignore[no-untyped-call]  # half a second
        return forward_on(*args, **kwargs)

    model, files = tiny_model("qwen2", tmp_path)
    monkeypatch.setattr(build_cuda, "forward_on", late)
    runner = load("cuda", files, **SETTINGS)
    prompt = list(range(16))
    (tokens,) = generate(runner, [Job(prompt, 12, 7)])
    assert agree(tokens, greedy(model, prompt, 12)) == 12
    runner.close()


def a_crowd_changes_nothing(backend: str, files: ModelFiles, n_tokens: int, vocab: int) -> None:
    """`n_tokens` sampled tokens of one request are those that it has alone also with 63 others,
    which come, go and draw otherwise meanwhile."""
    rng = random.Random(21)
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 64, "kv_blocks": 64 * 8}
    runner: Runner = load(backend, files, **settings)

    def job(seed: int, arrives: int, chunk: int) -> Job:
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 20))]
        sampling = Sampling(rng.choice([0.0, 0.7, 1.3]), 0, rng.choice([1.0, 0.9]), 0.0, seed)
        return Job(prompt, rng.randint(2, n_tokens + 6), chunk, sampling, arrives)

    mine = Job([5, 9, 3, 7, 7, 1], n_tokens, sampling=Sampling(0.9, 0, 0.95, 0.0, seed=12345))
    (alone,) = generate(runner, [dataclasses.replace(mine, tokens=[], tables=[])])
    others = [
        job(seed, rng.randrange(n_tokens // 2), rng.choice([3, 1 << 30])) for seed in range(63)
    ]
    crowd = [*others[:31], dataclasses.replace(mine, arrives=3), *others[31:]]
    assert generate(runner, crowd, shuffle_seed=4)[31] == alone
    runner.close()


@pytest.mark.parametrize("backend", PROCESSORS, indirect=True, scope="session")
def test_logits_are_close(pair: Pair) -> None:
    model, runner = pair
    (prompt,) = prompts(1)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
        logits = runner.forward(_prefill(prompt)).logits
    assert logits is not None
    torch.testing.assert_close(torch.from_numpy(logits[0]), expected, rtol=1e-4, atol=1e-4)
    runner.forward(_leave())


def _prefill(prompt: list[int], groups: int = 1) -> StepPlan:
    width = -(-len(prompt) // 8)
    tables = [list(range(group * width, (group + 1) * width)) for group in range(groups)]
    return plan(
        0,
        joins=[Join(0, GREEDY, 0, tables)],
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

"""The real default model in fp32 against transformers with the same dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.bench.naive_model import hf_model
from headrace.messages import Join, Output, Sampling
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import load_tokenizer
from tests.devices import BACKENDS, PROCESSORS, WITHOUT_CUDA, load
from tests.golden.reference import agree, greedy
from tests.golden.stepping import GREEDY, Job, generate, plan, run
from tests.golden.test_tiny import a_crowd_changes_nothing

pytestmark = pytest.mark.model

N_TOKENS = 12
TEXTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 5, 8, 13, 21,",
    "Once upon a time, in a valley between two rivers, there lived a miller. " * 9,
)
Trio = tuple[Any, Any, list[list[int]]]


@pytest.fixture(scope="module")
def trio(default_model: ModelFiles, backend: str) -> Iterator[Trio]:
    """The oracle, our runner, and the prompts."""
    runner = load(backend, default_model, dtype="float32", kv_blocks=300, max_num_seqs=32)
    tokenizer = load_tokenizer(default_model)
    yield hf_model(default_model, torch.float32), runner, tokenizer.encode_batch(TEXTS)
    runner.close()


@pytest.mark.parametrize("backend", PROCESSORS, indirect=True, scope="session")
@torch.inference_mode()
def test_prefill_logits_are_close(trio: Trio) -> None:
    model, runner, prompts = trio
    prompt = prompts[-1]
    expected = model(torch.tensor([prompt])).logits[0, -1]
    step = plan(
        0,
        joins=[Join(0, GREEDY, 0, [list(range(40, 60))])],
        rows=[0],
        starts=[0],
        counts=[len(prompt)],
        ids=[prompt],
        outputs=[Output.SAMPLE],
        draw_from=[0],
        draw_into=[0],
    )
    logits, _, busy_s = runner.worker.submit(lambda: runner.forward(step)).result()
    assert logits is not None
    torch.testing.assert_close(torch.from_numpy(logits[0]), expected, rtol=1e-3, atol=1e-3)
    assert busy_s > 0
    run(runner, plan(1, leaves=[0]))


def test_greedy_tokens_alone_in_chunks_and_among_others(trio: Trio) -> None:
    model, runner, prompts = trio
    expected = [greedy(model, prompt, N_TOKENS) for prompt in prompts]
    wanted = len(prompts) * N_TOKENS

    def check(outputs: list[list[int]]) -> None:
        compared = sum(agree(out, e) for out, e in zip(outputs, expected, strict=True))
        assert compared >= 0.9 * wanted, f"{compared} of {wanted}: the rest hid behind near-ties"

    check([generate(runner, [Job(prompt, N_TOKENS)])[0] for prompt in prompts])
    others = [
        Job(prompt[: 5 + i], N_TOKENS, sampling=Sampling(seed=i), arrives=i % 4)
        for i, prompt in enumerate(prompts[i % len(prompts)] for i in range(16))
    ]
    chunks = (7, 16, 64, 1 << 30, 64)
    jobs = [Job(p, N_TOKENS, chunk, arrives=2) for p, chunk in zip(prompts, chunks, strict=True)]
    check(generate(runner, [*others, *jobs])[len(others) :])


def test_a_seeded_request_is_the_same_among_63_others(
    default_model: ModelFiles, backend: str
) -> None:
    a_crowd_changes_nothing(backend, default_model, n_tokens=8, vocab=1000)


@pytest.mark.skipif(bool(WITHOUT_CUDA), reason=f"greedy tokens on cuda: {WITHOUT_CUDA}")
def test_greedy_tokens_on_cuda_are_the_processors(default_model: ModelFiles) -> None:
    """64 steps in float32, alone and all prompts together."""
    prompts = load_tokenizer(default_model).encode_batch(TEXTS)
    found = []
    for backend in BACKENDS:
        runner = load(backend, default_model, dtype="float32", kv_blocks=300, max_num_seqs=8)
        alone = [generate(runner, [Job(prompt, 64)])[0] for prompt in prompts]
        together = generate(runner, [Job(prompt, 64, chunk=64) for prompt in prompts])
        runner.close()
        found += [alone, together]
    model = hf_model(default_model, torch.float32)
    for prompt, *ways in zip(prompts, *found, strict=True):
        for tokens in ways[1:]:
            at = next((i for i in range(64) if tokens[i] != ways[0][i]), None)
            if at is not None:
                (near,) = greedy(model, prompt + tokens[:at], 1).near_tie
                assert near, f"token {at}: {tokens[at]} for {ways[0][at]}, and it is no near-tie"

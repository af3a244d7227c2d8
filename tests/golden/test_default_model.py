"""The real default model in fp32 against transformers with the same dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.backends.choose import settled
from headrace.bench.naive_model import hf_model
from headrace.config import Settings
from headrace.messages import Join, Output, Sampling
from headrace.runner.build import load_runner
from headrace.runner.runner import TorchRunner
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import load_tokenizer
from tests.golden.reference import agree, greedy
from tests.golden.stepping import GREEDY, Job, generate, plan, run

pytestmark = pytest.mark.model

N_TOKENS = 12
TEXTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 5, 8, 13, 21,",
    "Once upon a time, in a valley between two rivers, there lived a miller. " * 9,
)
Trio = tuple[Any, TorchRunner, list[list[int]]]


@pytest.fixture(scope="module")
def trio(default_model: ModelFiles) -> Iterator[Trio]:
    """The oracle, our runner, and the prompts."""
    settings = settled(Settings(backend="cpu", dtype="float32", kv_blocks=300, max_num_seqs=32))
    runner, info = load_runner(settings, default_model, lambda phase, seconds: None)
    assert info.spec.tied
    tokenizer = load_tokenizer(default_model)
    yield hf_model(default_model, torch.float32), runner, tokenizer.encode_batch(TEXTS)
    runner.close()


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
    logits, busy_s = runner.submit(lambda: runner.forward(step)).result()
    assert logits is not None
    torch.testing.assert_close(logits[0], expected, rtol=1e-3, atol=1e-3)
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

"""Greedy tokens equal transformers' whatever the schedule: chunks, cache, crowd, preemption, loop.

The full product on one tiny random model, pairwise on others; on the default model, as real lengths
and vocabulary take seconds a case, only as many as show every value of every axis. `make golden`
runs the full product on all. float32, the only type in which this is promised.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench.naive_model import hf_model
from headrace.models.spec import read_spec
from headrace.runner.checkpoint import open_checkpoint
from headrace.runner.weights import load_model
from headrace.sources.card import read_card
from headrace.sources.files import ModelFiles
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import load_tokenizer
from tests.devices import BACKENDS, MARKS
from tests.golden.product import (
    BLOCK,
    Case,
    Make,
    all_cases,
    few,
    on_device,
    on_processor,
    pairwise,
    run,
)
from tests.golden.reference import Greedy, agree, greedy, tiny_model

TINY = ("llama-gqa", "llama-mha", "llama-mqa-tied", "qwen2")
TINY_TOKENS, DEFAULT_TOKENS = 12, 16
LENGTHS = (1, 5, 16, 17, 31, 32, 33, 48, 64, 70, 2, 15, 3, 40, 16, 8, 10, 22, 7, 32)
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a valley between two mountains, there was a mill. " * 3,
    "水は高いところから低いところへ流れる。",
    "😀 🐙 mixed with text and\ttabs  and   spaces",
    "SELECT name, age FROM people WHERE",
    "Q: What is 17 + 25?\nA:",
    '{"name": "Ada", "born": 1815, "works": [',
    "Der Mühlbach führt das Wasser",
    "A",
)
CHATS = (
    "What is a headrace?",
    "Write a haiku about water.",
    "List three prime numbers.",
    "Translate 'good morning' into Spanish.",
    "Explain recursion in one sentence.",
    "Why is the sky blue?",
    "Give me a short Python function that reverses a string.",
    "Who wrote Hamlet?",
    "Summarise: the cat sat on the mat, then it slept all afternoon in the sun.",
)


def on(cases: Sequence[Case], backends: Sequence[str] = BACKENDS) -> list[Any]:
    """(backend, case)"""
    return [
        pytest.param(backend, case, id=f"{backend}-{case}", marks=MARKS[backend])
        for backend in backends
        for case in cases
    ]


def without(cases: Sequence[Case]) -> list[Case]:
    """The others."""
    return [case for case in all_cases() if case not in cases]


class Golden:
    """A model, prompts, and the reference's tokens for them."""

    def __init__(self, reference: Any, files: ModelFiles, prompts: list[list[int]], n: int) -> None:
        self.files, self.prompts, self.n_tokens = files, prompts, n
        self.model = load_model(read_spec(files), open_checkpoint(files), torch.float32)
        self.expected: list[Greedy] = [greedy(reference, prompt, n) for prompt in prompts]

    def check(self, backend: str, case: Case, threads: int, alone: int) -> None:
        """`alone`: how many prompts to run where each runs by itself."""
        make: Make = on_device(backend, self.files)
        if backend == "cpu":
            make = on_processor(self.model, threads)
        prompts = self.prompts if case.crowd == "crowd" else self.prompts[:alone]
        outcome = run(make, case, prompts, self.n_tokens)
        exempt = 0
        for tokens, expected in zip(outcome.tokens, self.expected, strict=False):
            exempt += self.n_tokens - agree(tokens, expected)
        print(f"{case}: {exempt} of {len(prompts) * self.n_tokens} tokens behind a near-tie")
        assert exempt <= len(prompts) * self.n_tokens // 10, "too many near-ties to mean anything"
        assert bool(outcome.preemptions) == (case.pressure == "preempted")
        if case.cache == "warm" and case.pressure == "roomy":
            assert outcome.cached_tokens == [len(p) // BLOCK * BLOCK for p in prompts]
        if case.cache == "off":
            assert outcome.cached_tokens == [0] * len(prompts)


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference, files = tiny_model(request.param, folder)
    rng = random.Random(11)
    prompts = [[rng.randrange(131) for _ in range(length)] for length in LENGTHS]
    return Golden(reference, files, prompts, TINY_TOKENS)


@pytest.mark.parametrize(("backend", "case"), on(pairwise()))
def test_tiny_models(tiny: Golden, backend: str, case: Case) -> None:
    tiny.check(backend, case, threads=1, alone=5)


@pytest.mark.parametrize("tiny", TINY[:1], indirect=True, scope="module")
@pytest.mark.parametrize(("backend", "case"), on(without(pairwise()), ["cpu"]))
def test_a_tiny_model_under_every_schedule(tiny: Golden, backend: str, case: Case) -> None:
    tiny.check(backend, case, threads=1, alone=5)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "case"), on(without(pairwise())))
def test_tiny_models_full(tiny: Golden, backend: str, case: Case) -> None:
    tiny.check(backend, case, threads=1, alone=5)


@pytest.fixture(scope="module")
def default(default_model: ModelFiles) -> Golden:
    tokenizer, template = load_tokenizer(default_model), ChatTemplate(read_card(default_model))
    texts = list(TEXTS)
    for chat in CHATS:
        texts.insert(0, template.render([{"role": "user", "content": chat}]))
    prompts = [tokenizer.encode(text) for text in texts]
    prompts[3] = prompts[3][: len(prompts[3]) // BLOCK * BLOCK]  # exactly k blocks
    return Golden(hf_model(default_model, torch.float32), default_model, prompts, DEFAULT_TOKENS)


@pytest.mark.parametrize(("backend", "case"), on(few()))
def test_default_model(default: Golden, backend: str, case: Case) -> None:
    default.check(backend, case, threads=torch.get_num_threads(), alone=4)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "case"), on(without(few())))
def test_default_model_full(default: Golden, backend: str, case: Case) -> None:
    default.check(backend, case, threads=torch.get_num_threads(), alone=6)

"""Models of which some or all layers have a window, in less memory than all layers would need for
their sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.completion import Completion
from headrace.engine.loop import Engine
from headrace.kv.groups import GroupedCache
from headrace.kv.room import most_held
from headrace.text import fake_tokenizer
from tests.devices import MARKS, WITHOUT_CUDA, WITHOUT_NATIVE, asked
from tests.golden.families import VOCAB, WINDOW, save
from tests.golden.reference import NEAR_TIE

BLOCK, TOKENS = 4, 64
LENGTHS = (WINDOW - 1, WINDOW + 1, 3 * WINDOW)
SIZES: dict[str, Any] = {
    "block_size": BLOCK, "dtype": "float32", "max_model_len": 120, "threads": 1, "overlap": "on",
    "max_num_batched_tokens": 13,
}  # fmt: skip
WINDOWS = {"mistral": (WINDOW,), "gemma3": (0, WINDOW), "gpt-oss": (0, WINDOW, WINDOW)}
CASES = [pytest.param(name, "cpu", marks=MARKS["cpu"]) for name in WINDOWS]
if not WITHOUT_CUDA:
    CASES += [pytest.param(name, "cuda", marks=MARKS["cuda"]) for name in WINDOWS]
if not WITHOUT_NATIVE:
    CASES += [pytest.param(name, "native", marks=MARKS["native"]) for name in ("mistral", "gemma3")]


def sized(backend: str) -> dict[str, Any]:
    """Settings of a model in tests; threads are the processor's."""
    sizes = {key: value for key, value in SIZES.items() if backend != "cuda" or key != "threads"}
    return asked(backend) | sizes


@torch.inference_mode()
def check(model: Any, prompt: list[int], answer: Completion) -> None:
    """Each token is the most likely one to transformers, given those before it."""
    logits = model(torch.tensor([prompt + answer.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    taken = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert float((logits.amax(1) - taken).max()) < NEAR_TIE


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_long_answers_in_a_small_cache(name: str, backend: str, tmp_path: Path) -> None:
    """Side by side, in chunks of 13. A sequence that goes on is hit by its last window where layers
    have one: what lay before was given to others, and a prefix that ends there is no hit."""
    model, files = save(name, tmp_path)
    fake_tokenizer.build().save(str(files.path / "tokenizer.json"))
    prompts = [[(7 * i + 5 * j) % VOCAB for j in range(n)] for i, n in enumerate(LENGTHS)]
    long, short = (
        headrace.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (TOKENS, 6)
    )
    lengths = [-(-(n + TOKENS) // BLOCK) for n in LENGTHS]
    # Two blocks of a chunk, of each of two steps, come before others go.
    room = sum(most_held(WINDOWS[name], BLOCK, n) for n in lengths) + 8
    assert room < 0.8 * len(WINDOWS[name]) * sum(lengths)
    with headrace.LLM(str(files.path), **sized(backend), kv_blocks=room) as llm:
        engine = llm._engine
        assert isinstance(engine, Engine)
        kv = engine.scheduler.kv
        assert isinstance(kv, GroupedCache)
        assert kv.windows == WINDOWS[name]
        answers = llm.generate(prompts, long)
        assert engine._tally.preemptions == 0
        more = [p + one.token_ids for p, one in zip(prompts, answers, strict=True)]
        assert kv.match(kv.open("", ""), more[2][: 2 * WINDOW]) == 0, "its window is gone"
        after = llm.generate(more[2], short)
        kv.check()
        assert kv.used_blocks == 0
    for prompt, answer in zip([*prompts, more[2]], answers + after, strict=True):
        check(model, prompt, answer)
    assert {answer.cached_tokens for answer in answers} == {0}
    assert after[0].cached_tokens == (len(more[2]) - 1) // BLOCK * BLOCK


GEMMA = [case for case in CASES if case.values[0] == "gemma3" and case.values[1] != "native"]


@pytest.mark.parametrize(("name", "backend"), GEMMA)
def test_many_more_sequences_than_without_groups(name: str, backend: str, tmp_path: Path) -> None:
    """Prompts that begin alike, one after another and preempted in between: tokens stay right."""
    model, files = save(name, tmp_path)
    fake_tokenizer.build().save(str(files.path / "tokenizer.json"))
    common = [(11 * j) % VOCAB for j in range(40)]
    prompts = [[*common[: 16 + 3 * i], i, i + 1] for i in range(8)]
    asks = headrace.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with headrace.LLM(str(files.path), **sized(backend), kv_blocks=48) as llm:
        engine = llm._engine
        assert isinstance(engine, Engine)
        engine.scheduler.headroom_tokens = 0  # who leaves room is preempted less
        answers = llm.generate(prompts, asks)
        assert engine._tally.preemptions > 0
        again = llm.generate(prompts, asks)
        engine.scheduler.kv.check()
    for prompt, first, second in zip(prompts, answers, again, strict=True):
        check(model, prompt, first)
        check(model, prompt, second)
    assert sum(answer.cached_tokens for answer in again) > 0

"""A model whose layers all have a window, in less memory than its sequences are long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.completion import Completion
from headrace.engine.loop import Engine
from headrace.kv.groups import GroupedCache
from headrace.text import fake_tokenizer
from tests.devices import PROCESSORS, asked
from tests.golden.families import WINDOW, save
from tests.golden.reference import NEAR_TIE

SIZES: dict[str, Any] = {
    "kv_blocks": 24, "block_size": 4, "dtype": "float32", "max_model_len": 80, "threads": 1,
    "overlap": "on",
}  # fmt: skip


@torch.inference_mode()
def check(model: Any, prompt: list[int], answer: Completion) -> None:
    """Each token is the most likely one to transformers, given those before it."""
    logits = model(torch.tensor([prompt + answer.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    taken = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert float((logits.amax(1) - taken).max()) < NEAR_TIE


@pytest.mark.parametrize("backend", PROCESSORS)
def test_long_answers_in_a_small_cache(tmp_path: Path, backend: str) -> None:
    """Three sequences of 70 tokens would need 54 blocks, and there are 24. One that goes on is hit
    by its last window: what lay before was given to others."""
    model, files = save("mistral", tmp_path)
    fake_tokenizer.build().save(str(files.path / "tokenizer.json"))
    prompts = [[(7 * i + 5 * j) % 131 for j in range(30)] for i in range(3)]
    long, short = (
        headrace.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 6)
    )
    with headrace.LLM(str(files.path), **asked(backend), **SIZES) as llm:
        engine = llm._engine
        assert isinstance(engine, Engine)
        kv = engine.scheduler.kv
        assert isinstance(kv, GroupedCache)
        assert kv.windows == [WINDOW]
        answers = llm.generate(prompts, long)
        assert engine._tally.preemptions == 0
        more = [p + one.token_ids for p, one in zip(prompts, answers, strict=True)]
        table = kv.open("", "")
        assert kv.match(table, more[1]) == 68
        first = kv.block_size * table.freed
        kv.release(table, 0)
        assert kv.match(kv.open("", ""), more[1][:first]) == 0, "what lay before is gone"
        after = llm.generate(more[1], short)
    for prompt, answer in zip([*prompts, more[1]], answers + after, strict=True):
        check(model, prompt, answer)
    assert {answer.cached_tokens for answer in answers} == {0}
    assert after[0].cached_tokens == 68, "all whole blocks of 70 tokens"

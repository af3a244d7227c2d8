"""Log-probabilities of prompts and draws equal log-softmax of transformers' logits, in float32."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from headrace.beams import BeamRules, BeamSearch
from headrace.bench.naive_model import hf_model
from headrace.config import Settings
from headrace.engine.loop import Engine
from headrace.launch import make_cache
from headrace.messages import Logprobs, Sampling, Submit
from headrace.sampling.logprobs import report
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import load_tokenizer
from tests.devices import load
from tests.golden.reference import TINY, tiny_model

BLOCK = 8
CLOSE = 1e-4


class Told:
    """What an engine says: tokens and reports of each (handle, choice), prompts of each handle."""

    def __init__(self, engine: Engine, submits: Sequence[Submit]) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.said: dict[tuple[int, int], list[Logprobs]] = {}
        self.prompts: dict[int, list[Logprobs]] = {submit.handle: [] for submit in submits}
        for submit in submits:
            engine.submit(0, submit)
        while engine.has_work:
            for out in engine.turn().values():
                for piece in out.prompt_logprobs:
                    assert piece.first == len(self.prompts[piece.handle]) + 1
                    self.prompts[piece.handle] += piece.entries
                columns = zip(out.handles, out.choices, out.tokens, out.logprobs, strict=True)
                for handle, choice, token, entry in columns:
                    assert entry is not None
                    self.tokens.setdefault((handle, choice), []).append(token)
                    self.said.setdefault((handle, choice), []).append(entry)
                assert not any(done.error for done in out.dones)


def engine_of(runner: Any, *, budget: int = 4096, overlap: bool = True) -> Engine:
    capacity = runner.capacity
    settings = Settings(max_num_seqs=capacity.max_rows, max_num_batched_tokens=budget)
    kv = make_cache(capacity, prefix_caching=True)
    return Engine(settings, kv, runner, overlap=overlap)


@torch.inference_mode()
def check(model: Any, prompt: list[int], tokens: list[int], entries: list[Logprobs]) -> None:
    """`entries` are of `tokens` that follow `prompt`."""
    logits = model(torch.tensor([prompt + tokens])).logits[0].double()
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    assert len(entries) == len(tokens)
    for token, entry, row in zip(tokens, entries, expected, strict=True):
        assert math.isclose(entry.logprob, float(row[token]), abs_tol=CLOSE)
        near = int((row > row[token] + CLOSE).sum()) + 1
        far = int((row > row[token] - CLOSE).sum()) + 1
        assert near <= entry.rank <= far
        for other, value in zip(entry.top_ids, entry.top, strict=True):
            assert math.isclose(value, float(row[other]), abs_tol=CLOSE)
        top = row.topk(len(entry.top)).values.tolist() if entry.top else []
        assert all(math.isclose(a, b, abs_tol=CLOSE) for a, b in zip(entry.top, top, strict=True))


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mqa-tied", "qwen2"])
def test_tiny_models(name: str, backend: str, tmp_path: Path) -> None:
    """Whole and in chunks, n = 2, preempted, with the cache warm."""
    assert name in TINY
    model, files = tiny_model(name, tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(131) for _ in range(n)] for n in (1, 8, 21, 40, 33, 16)]
    preempted = 0
    for budget in (4096, 16):
        runner = load(
            backend,
            files,
            dtype="float32",
            kv_blocks=26,  # not enough for all
            max_num_seqs=12,
            block_size=BLOCK,
            max_model_len=80,
            threads=1,
        )
        engine = engine_of(runner, budget=budget)
        engine.scheduler.headroom_tokens = 1
        for _ in range(2):
            submits = [
                Submit(
                    handle,
                    prompt,
                    12,
                    Sampling(temperature=1.0, seed=handle, logprobs=handle % 4),
                    n=1 + handle % 2,
                    prompt_logprobs=handle % 3 - 1,
                )
                for handle, prompt in enumerate(prompts)
            ]
            told = Told(engine, submits)
            for submit in submits:
                if submit.prompt_logprobs >= 0:
                    said = told.prompts[submit.handle]
                    check(model, submit.prompt[:1], submit.prompt[1:], said)
                    assert all(len(one.top) == submit.prompt_logprobs for one in said)
                for choice in range(submit.n):
                    key = (submit.handle, choice)
                    assert len(told.tokens[key]) == 12
                    check(model, submit.prompt, told.tokens[key], told.said[key])
        preempted += engine.stats().preemptions
        engine.kv.check()
        engine.close()
    assert preempted


@pytest.fixture(scope="module")
def oracle(default_model: ModelFiles) -> Any:
    return hf_model(default_model, torch.float32)


def test_default_model(default_model: ModelFiles, backend: str, oracle: Any) -> None:
    runner = load(backend, default_model, dtype="float32", kv_blocks=60, max_num_seqs=4)
    tokenizer = load_tokenizer(default_model)
    text = "Once upon a time, in a valley between two rivers, there lived a miller. " * 2
    prompt = tokenizer.encode(text)
    engine = engine_of(runner, budget=50)
    sampling = Sampling(temperature=0.0, logprobs=5)
    told = Told(engine, [Submit(1, prompt, 6, sampling, prompt_logprobs=5)])
    engine.close()
    entries = told.prompts[1] + told.said[1, 0]
    check(oracle, prompt[:1], prompt[1:] + told.tokens[1, 0], entries)


@pytest.mark.parametrize(
    ("width", "penalty", "early"),
    [(3, 1.0, False), (4, 0.0, True), (5, 2.0, "never"), (2, -0.5, False)],
)
@torch.inference_mode()
def test_beams_are_those_of_transformers(
    width: int, penalty: float, early: bool | Literal["never"], tmp_path: Path
) -> None:
    """The same hypotheses, scores and order, from the same logits."""
    model, _ = tiny_model("llama-gqa", tmp_path)
    ends = [3, 17, 40, 77]
    for prompt in ([5, 9, 60], [1, 2, 3, 4, 100]):
        search = BeamSearch(prompt, BeamRules(width, penalty, early), 10, ends)
        while not search.done:
            logits = model(torch.tensor(search.prompts)).logits[:, -1].float().numpy()
            search.feed(report(logits, [0] * len(logits), [2 * width] * len(logits)))
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=10,
            length_penalty=penalty,
            early_stopping=early,
            eos_token_id=ends,
            pad_token_id=0,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for beam, row, score in zip(
            search.best(width), out.sequences, out.sequences_scores, strict=True
        ):
            wanted = row[len(prompt) :].tolist()
            assert beam.tokens == wanted[: len(beam.tokens)]
            assert set(wanted[len(beam.tokens) :]) <= {0, ends[0]}, "nothing but padding"
            mine = beam.total / math.pow(len(beam.tokens), penalty)
            assert math.isclose(mine, float(score), abs_tol=CLOSE)

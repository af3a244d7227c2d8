"""Hooks that ask a classification model on another headrace server: it judges, and it chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from headrace.text import fake_tokenizer
from tests.e2e.serve_process import ServeProcess
from tests.e2e.serving import Server
from tests.golden.classifiers import head_scores, tiny_classifier

TEXT = "/v1/completions"
Judge = Callable[[str], float]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Judge]]:
    """A server of a tiny model with two labels, and what transformers says: P(LABEL_1)."""
    folder = tmp_path_factory.mktemp("judge")
    model, _ = tiny_classifier("llama", folder, 2, vocab_size=259)
    tokenizer = fake_tokenizer.build()
    tokenizer.save(str(folder / "tokenizer.json"))

    @cache
    def probability(text: str) -> float:
        scores = np.exp(head_scores(model, tokenizer.encode(text).ids))
        return float(scores[1] / scores.sum())

    options = ("--dtype", "float32", "--kv-blocks", "256", "--api-workers", "1")
    with ServeProcess(str(folder), "--served-model-name", "judge", *options) as server:
        yield server.url, probability


@pytest.fixture(scope="module")
def server(judge: tuple[str, Judge]) -> Iterator[Server]:
    url, _ = judge
    hooks = (f"moderation=model:{url}#labels=LABEL_1", f"score=model:{url}#label=1")
    with Server(hook=hooks) as running:
        yield running


def words(judge: Judge) -> tuple[list[str], list[str]]:
    """Texts that the model finds fine, and those that it does not; clear ones."""
    texts = [f"{word} {i}" for i in range(10) for word in ("river", "mill", "wheel")]
    fine = [text for text in texts if judge(text) < 0.49]
    other = [text for text in texts if judge(text) > 0.51]
    assert fine
    assert other
    return fine[:3], other[:3]


def test_the_model_judges_prompts(server: Server, judge: tuple[str, Judge]) -> None:
    fine, other = words(judge[1])
    for text in fine:
        status, answer = server.post(TEXT, {"prompt": text, "max_tokens": 1})
        assert status == 200, answer
    for text in other:
        status, answer = server.post(TEXT, {"prompt": [fine[0], text], "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (400, "content_filter")
        assert "LABEL_1" in answer["error"]["message"]


def likelihood(choice: dict[str, Any]) -> float:
    return float(np.mean(choice["logprobs"]["token_logprobs"]))


def test_the_model_chooses_among_answers(server: Server, judge: tuple[str, Judge]) -> None:
    (prompt, *_), _ = words(judge[1])
    others = 0
    for seed in range(3):
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "temperature": 2, "seed": seed}
        _, every = server.post(TEXT, {**asked, "n": 6, "logprobs": 0})
        scores = {choice["text"]: judge[1](prompt + choice["text"]) for choice in every["choices"]}
        likely = max(every["choices"], key=likelihood)
        _, answer = server.post(TEXT, {**asked, "best_of": 6})
        (chosen,) = answer["choices"]
        assert chosen["score"] == pytest.approx(scores[chosen["text"]], abs=1e-5)
        assert chosen["score"] == pytest.approx(max(scores.values()), abs=1e-5)
        others += chosen["text"] != likely["text"]
    assert others, "the score never changed which answer was chosen"

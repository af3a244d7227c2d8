"""LLM.embed and LLM.classify on the fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.backends.fake.model import advance, root
from headrace.backends.fake.vectors import WIDTH, pooled
from headrace.errors import ContextTooLong, InvalidRequest

LONGEST = 64


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        backend="fake", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=LONGEST
    ) as made:
        yield made


def states(text: str) -> list[int]:
    found = [root("")]
    for byte in text.encode():
        found.append(advance(found[-1], byte))
    return found[1:]


def test_embed(llm: LLM) -> None:
    texts = ["a", "some words", "x" * LONGEST] + [f"number {i}" for i in range(9)]
    found = llm.embed(texts)
    assert [one.prompt_index for one in found] == list(range(len(texts)))
    for one, text in zip(found, texts, strict=True):
        want = pooled("sum", states(text))
        np.testing.assert_allclose(one.embedding, want / np.linalg.norm(want), rtol=1e-5)
        assert (one.prompt_token_ids, one.error) == (list(text.encode()), "")
    (raw,) = llm.embed(list(b"some words"), pooling="last", normalize=False)
    assert raw.embedding == pooled("last", states("some words")).tolist()
    (short,) = llm.embed("some words", dimensions=2)
    assert len(short.embedding) == 2
    assert np.linalg.norm(short.embedding) == pytest.approx(1, rel=1e-5)


def test_classify(llm: LLM) -> None:
    for one, text in zip(llm.classify(["good", "bad"]), ("good", "bad"), strict=True):
        scores = pooled("scores", states(text))
        assert one.scores == scores.tolist()
        np.testing.assert_allclose(one.probs, np.exp(scores) / np.exp(scores).sum(), rtol=1e-5)
        assert one.label == f"LABEL_{scores.argmax()}"


def test_text_goes_on_beside(llm: LLM) -> None:
    before = llm.generate("once", SamplingParams(temperature=0, max_tokens=9))[0].text
    assert llm.embed("once")[0].embedding
    assert llm.generate("once", SamplingParams(temperature=0, max_tokens=9))[0].text == before


@pytest.mark.parametrize(
    ("prompts", "options", "error"),
    [
        ("", {}, InvalidRequest),
        ("x" * (LONGEST + 1), {}, ContextTooLong),
        ("a", {"dimensions": WIDTH + 1}, InvalidRequest),
        ("a", {"pooling": "cls"}, InvalidRequest),
        ([259], {}, InvalidRequest),
    ],
)
def test_refusals(llm: LLM, prompts: Any, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        llm.embed(prompts, **options)

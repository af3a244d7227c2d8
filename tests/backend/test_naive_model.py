"""The naive engine on a tiny random Llama of transformers: its tokens are `generate()`'s own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.bench.naive import NaiveEngine, hugging_face
from headrace.config import Settings
from headrace.messages import Abort, End, Sampling, Submit

VOCAB = 61


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def engine(model: Any) -> Iterator[NaiveEngine]:
    made = NaiveEngine(Settings(), hugging_face(model), max_model_len=128, vocab_size=VOCAB)
    yield made
    made.close()


def run(
    engine: NaiveEngine, *submits: Submit
) -> tuple[dict[tuple[int, int], list[int]], list[End]]:
    tokens: dict[tuple[int, int], list[int]] = {}
    ends: list[End] = []
    for submit in submits:
        engine.submit(0, submit)
    while engine.has_work:
        for out in engine.turn().values():
            for handle, choice, token in zip(out.handles, out.choices, out.tokens, strict=True):
                tokens.setdefault((handle, choice), []).append(token)
            ends += out.ends
            assert not [done.error for done in out.dones if done.error]
    return tokens, ends


def test_greedy_is_generates_own(engine: NaiveEngine, model: Any) -> None:
    prompt = [5, 9, 33, 2]
    tokens, ends = run(engine, Submit(1, prompt, 12, Sampling(temperature=0.0)))
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert tokens[1, 0] == ids[0, 4:].tolist()
    assert [end.reason for end in ends] == ["length"]


def test_a_stop_id_ends_it_and_is_sent(engine: NaiveEngine) -> None:
    greedy = Sampling(temperature=0.0)
    free, _ = run(engine, Submit(1, [5, 9], 12, greedy))
    stop = free[1, 0][4]
    first = free[1, 0].index(stop)
    tokens, ends = run(engine, Submit(2, [5, 9], 12, greedy, stop_ids=[stop, 60]))
    assert tokens[2, 0] == free[1, 0][: first + 1]
    assert ends == [End(2, 0, "stop", stop)]


def test_a_seed_gives_the_same_tokens_and_choices_differ(engine: NaiveEngine) -> None:
    hot = Sampling(temperature=2.0, seed=2**63 + 5)
    tokens, _ = run(engine, Submit(1, [4], 20, hot, n=2), Submit(2, [4], 20, hot))
    assert tokens[1, 0] == tokens[2, 0]
    assert tokens[1, 0] != tokens[1, 1]
    other, _ = run(engine, Submit(3, [4], 20, Sampling(temperature=2.0, seed=6)))
    assert other[3, 0] != tokens[1, 0]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_truncation_reaches_generate(engine: NaiveEngine, narrow: dict[str, Any]) -> None:
    greedy, _ = run(engine, Submit(1, [7, 7], 10, Sampling(temperature=0.0)))
    tokens, _ = run(engine, Submit(2, [7, 7], 10, Sampling(temperature=1.5, seed=1, **narrow)))
    assert tokens[2, 0] == greedy[1, 0]
    free, _ = run(engine, Submit(3, [7, 7], 10, Sampling(temperature=1.5, seed=1)))
    assert free[3, 0] != greedy[1, 0]


def test_an_abort_leaves_generate_and_the_next_request_runs(engine: NaiveEngine) -> None:
    engine.submit(0, Submit(1, [5], 120, Sampling(temperature=0.0)))
    while not any(out.tokens for out in engine.turn().values()):
        pass
    engine.abort(0, Abort(1))
    tokens, _ = run(engine, Submit(2, [6], 3, Sampling(temperature=0.0)))
    assert len(tokens[2, 0]) == 3
    assert engine.stats().generation_tokens < 120


def test_the_global_generator_is_left_alone(engine: NaiveEngine) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    run(engine, Submit(1, [5], 4, Sampling(temperature=1.0, seed=9)))
    engine.close()  # the worker has left generate() for certain
    assert torch.equal(torch.rand(3), expected)


def test_threads_are_set_where_generate_runs(model: Any) -> None:
    seen: list[int] = []
    generate = hugging_face(model, threads=1)
    worker = threading.Thread(
        target=lambda: generate(
            [5], 2, Sampling(temperature=0.0), 0, [], lambda _: seen.append(torch.get_num_threads())
        )
    )
    worker.start()
    worker.join()
    assert seen == [1, 1]

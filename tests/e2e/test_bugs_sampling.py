"""Bugs B and E of other servers, over HTTP: what a sampling parameter does, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.serving import Server

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(max_num_seqs=16, default_sampling="top_n_sigma=0") as running:
        yield running


def post(server: Server, **fields: Any) -> tuple[int, Any]:
    raw = fields.pop("raw", None)
    body = raw if raw is not None else json.dumps({"prompt": "list/", **fields})
    status, _, content = server.request("POST", TEXT, body.encode())
    return status, json.loads(content)


def text(server: Server, **fields: Any) -> str:
    status, answer = post(server, **{"max_tokens": 30, "seed": 5, "ignore_eos": True, **fields})
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def test_b012_min_tokens_holds_stop_strings_and_end_tokens_back(server: Server) -> None:
    stops = [*"etaoinshrdlumf ", "th"]
    fields = {"temperature": 0, "max_tokens": 60, "banned_token_ids": [256, 257, 258]}
    free = text(server, **fields)
    answer = post(server, stop=stops, min_tokens=40, **fields)[1]
    choice = answer["choices"][0]
    tokens = answer["usage"]["completion_tokens"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == free[: tokens - 1]
    assert choice["stop_reason"] == free[tokens - 1]
    assert tokens == 40 + min(free[39:].index(stop) for stop in stops if stop in free[39:])
    ends = [
        post(server, min_tokens=m, max_tokens=60, seed=s, logit_bias={"258": 100})[1]["usage"]
        for m, s in ((0, 1), (7, 1), (7, 2))
    ]
    assert [usage["completion_tokens"] for usage in ends] == [1, 8, 8]
    assert post(server, min_tokens=61, max_tokens=60)[1]["error"]["param"] == "min_tokens"


@pytest.mark.parametrize(
    "bias",
    [{"191222": -100, "5": 5}, {"-1": 1}, {"abc": 1}, {"5.0": 1}, {"5": 101}, {"5": -101},
     {"5": None}],
)  # fmt: skip
def test_b035_bad_biases_are_refused(server: Server, bias: dict[str, Any]) -> None:
    status, answer = post(server, logit_bias=bias)
    assert status == 400
    assert answer["error"]["param"].startswith("logit_bias")


def test_b035_biases_force_and_forbid(server: Server) -> None:
    assert text(server, logit_bias={}) == text(server, logit_bias=None) == text(server)
    assert text(server, logit_bias={str(ord("z")): 100}) == "z" * 30
    free = text(server, temperature=0)
    gone = {str(ord(free[0])): -100}
    assert free[0] not in text(server, temperature=0, logit_bias=gone)
    assert set(text(server, allowed_token_ids=[97, 98])) <= {"a", "b"}
    assert "e" not in text(server, banned_token_ids=[ord("e")], max_tokens=200)


def test_bad_words_are_never_completed(server: Server) -> None:
    free = text(server, temperature=0, max_tokens=100)
    words = sorted({free[i : i + 2] for i in range(20)} - {"  "})
    ruled = text(server, temperature=0, max_tokens=100, bad_words=words)
    assert not any(word.strip() in ruled for word in words if len(word.strip()) == 2)


@pytest.mark.parametrize("field", [
    "temperature", "top_p", "min_p", "typical_p", "top_n_sigma", "repetition_penalty",
    "frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base", "lz_penalty",
])  # fmt: skip
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"1"', "-3", "[1]"])
def test_b037_no_number_of_that_range(server: Server, field: str, value: str) -> None:
    status, answer = post(server, raw=f'{{"prompt": "a", "{field}": {value}}}')
    assert (status, answer["error"]["param"]) == (400, field)
    assert field in answer["error"]["message"]


@pytest.mark.parametrize("prompt", [
    [-1], [[-1]], [259], [5279552648203111001], [1.5], [], [[]], ["a", 5], [[1], "a"],
])  # fmt: skip
def test_b042_illegal_prompt_ids(server: Server, prompt: Any) -> None:
    status, answer = post(server, prompt=prompt)
    assert (status, answer["error"]["param"]) == (400, "prompt")


def test_b028_b029_b030_rows_keep_their_own_parameters(server: Server) -> None:
    """Many at once, each with its own rules, penalties and filters: as if alone."""
    requests: list[dict[str, Any]] = [
        {"temperature": 1.6, "top_p": 0.01 if i % 2 else 1.0, "seed": i} for i in range(6)
    ]
    requests += [
        {"seed": 17, "min_p": 0.5},
        {"seed": 3, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "max_tokens": 60},
        {"temperature": 0, "repetition_penalty": 5.0, "presence_penalty": 1.0},
        {"temperature": 0, "dry_multiplier": 2.0, "dry_allowed_length": 1, "max_tokens": 60},
        {"seed": 4, "lz_penalty": 0.3, "lz_window": 20},
        {"seed": 5, "typical_p": 0.3},
        {"seed": 6, "top_n_sigma": 0.2, "n": 2},
        {"seed": 7, "bad_words": ["e", "th"], "min_tokens": 5},
    ]
    alone = [text(server, **fields) for fields in requests]
    with ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(lambda fields: text(server, **fields), requests))
    assert crowd == alone
    greedy = text(server, temperature=0)
    assert alone[1] == alone[3] == alone[5] == greedy
    assert alone[8] != greedy
    assert alone[9] != text(server, temperature=0, max_tokens=60)


def test_penalties_do_what_they_say(server: Server) -> None:
    """A frequency penalty evens out how often each letter comes; a negative one does not."""

    def most(**fields: Any) -> int:
        answer = text(server, max_tokens=80, temperature=0.5, **fields)
        return max(map(answer.count, set(answer)))

    assert most(frequency_penalty=2) < most() < most(frequency_penalty=-2)
    assert most(repetition_penalty=3) < most()
    assert text(server, frequency_penalty=0, presence_penalty=0, repetition_penalty=1) == text(
        server
    )


def test_b090_rules_times_prompts_are_bounded(server: Server) -> None:
    """50 kB of words are 100 000 ids, of which every prompt would have its own copy."""
    words = [f"{i:0200}" for i in range(256)]
    body = {"bad_words": words, "max_tokens": 1}
    status, answer = post(server, prompt=["a"] * 100, **body)
    assert status == 400, answer
    assert answer["error"]["param"] == "prompt"
    assert "8388608" in answer["error"]["message"]
    assert post(server, prompt=["a"] * 2, **body)[0] == 200

"""Log-probabilities, echo, token ids and best_of over HTTP: all forms, streamed or not."""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from openai import OpenAI

from headrace.backends.fake.logprobs import report
from headrace.backends.fake.model import END_OF_TURN, advance, root
from headrace.beams import BeamRules, BeamSearch
from tests.e2e.serving import PATIENCE_S, Server

HELLO = [{"role": "user", "content": "Grüße 😀"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(max_num_seqs=8, max_model_len=512, block_size=16) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as made:
        yield made


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, _, raw = server.request(
        "POST", path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    assert status == 200, raw
    answer: dict[str, Any] = json.loads(raw)
    return answer


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, without [DONE]."""
    status, _, raw = server.request(
        "POST",
        path,
        json.dumps({**body, "stream": True}).encode(),
        {"content-type": "application/json"},
    )
    assert status == 200, raw
    events = [line[6:] for line in raw.decode().split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def merged(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices of a stream, put together: text, logprobs, token_ids, finish_reason."""
    out: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            at = out.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": {}})
            at["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            at["token_ids"] += choice.get("token_ids") or []
            at["prompt_token_ids"] = at.get("prompt_token_ids") or choice.get("prompt_token_ids")
            for name, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    at["logprobs"].setdefault(name, []).extend(values)
            at["finish_reason"] = choice["finish_reason"]
    return out


def expected(prompt: list[int], tokens: list[int], count: int) -> list[Any]:
    """What the fake model says of `tokens` after `prompt`."""
    state, out = root(""), []
    for token in prompt:
        state = advance(state, token)
    for token in tokens:
        out.append(report(state, token, count, END_OF_TURN))
        state = advance(state, token)
    return out


def test_chat_form(client: OpenAI, server: Server) -> None:  # B022
    for count in (0, 5):
        answer = client.chat.completions.create(
            model="fake",
            messages=HELLO,  # type: ignore[arg-type]
            max_tokens=12,
            seed=3,
            logprobs=True,
            top_logprobs=count,
            extra_body={"return_token_ids": True},
        )
        (choice,) = answer.choices
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        entries = choice.logprobs.content
        assert answer.usage is not None
        assert len(entries) == answer.usage.completion_tokens == len(choice.token_ids)  # type: ignore[attr-defined]
        assert b"".join(bytes(e.bytes or []) for e in entries).decode() == choice.message.content
        said = expected(answer.prompt_token_ids, choice.token_ids, count)  # type: ignore[attr-defined]
        for entry, want in zip(entries, said, strict=True):
            assert math.isclose(entry.logprob, want.logprob, abs_tol=1e-9)
            assert len(entry.top_logprobs) == count
            assert [top.bytes for top in entry.top_logprobs] == [
                [i] if i < 256 else None for i in want.top_ids
            ]
    plain = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=3)  # type: ignore[arg-type]
    assert plain.choices[0].logprobs is None


def test_completions_form(client: OpenAI) -> None:  # B022
    for count in (0, 1, 5):
        answer = client.completions.create(
            model="fake", prompt="one", max_tokens=9, seed=5, logprobs=count
        )
        (choice,) = answer.choices
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.text_offset is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.text_offset == list(range(9))
        said = expected(list(b"one"), list(choice.text.encode()), count)
        assert logprobs.token_logprobs == pytest.approx([one.logprob for one in said])
        for table, one, token in zip(logprobs.top_logprobs, said, logprobs.tokens, strict=True):
            assert table[token] == pytest.approx(one.logprob)
            assert count <= len(table) <= count + 1


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": "Grüße 😀", "logprobs": 2}),
    ("/v1/completions", {"prompt": list("漢字".encode()), "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["one apple", "two pears"], "logprobs": 1, "echo": True}),
]


@pytest.mark.parametrize(("path", "body"), SHAPES)
@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 1.0, "seed": 11},
        {"temperature": 0, "stop": ["e", "a", "t"]},
        {"temperature": 1.0, "seed": 4, "stop": [" "], "include_stop_str_in_output": True},
        {"temperature": 2.0, "seed": 9, "skip_special_tokens": False, "ignore_eos": True, "n": 3},
    ],
)
def test_a_stream_says_what_a_whole_answer_says(
    server: Server, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:  # B026, B027
    """Cold and with the prefix cache warm; each choice with its own state."""
    full = {**body, **more, "max_tokens": 40, "return_token_ids": True}
    whole, again = post(server, path, full), post(server, path, full)
    assert whole["choices"] == again["choices"]
    chunks = streamed(server, path, {**full, "stream_options": {"include_usage": True}})
    pieces = merged(chunks)
    prompts = len(body["prompt"]) if isinstance(body.get("prompt", ""), list) else 1
    prompts = prompts if isinstance(body.get("prompt", [0])[0], str) else 1
    assert sorted(pieces) == list(range(prompts * more.get("n", 1)))
    for choice in whole["choices"]:
        piece = pieces[choice["index"]]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert piece["text"] == text
        assert piece["finish_reason"] == choice["finish_reason"]
        assert piece["token_ids"] == choice["token_ids"]
        known = {k: v for k, v in choice["logprobs"].items() if v is not None}
        assert piece["logprobs"] == known
        check_offsets(text, choice["logprobs"])
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert whole["usage"]["completion_tokens"] == sum(
        len(choice["token_ids"]) for choice in whole["choices"]
    )


def check_offsets(text: str, logprobs: dict[str, Any]) -> None:
    """Offsets and bytes add up to the text."""
    if "content" in logprobs:
        raw = b"".join(bytes(entry["bytes"] or []) for entry in logprobs["content"])
        assert raw.decode("utf-8", "replace") == text
        return
    offsets = [*logprobs["text_offset"], len(text)]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert len(offsets) - 1 == len(logprobs["tokens"]) == len(logprobs["token_logprobs"])
    for token, start, end in zip(logprobs["tokens"], offsets, offsets[1:], strict=False):
        part = text[start:end]
        assert token == part or not part or token.startswith(("bytes:", "<|")) or end == len(text)


def test_events_carry_the_tokens_whose_text_they_carry(server: Server) -> None:
    """Text held back for a stop string holds back its tokens' entries."""
    body = {"messages": HELLO, "logprobs": True, "max_tokens": 60, "temperature": 0}
    text = post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    stop = text[30:40]
    for chunk in streamed(server, "/v1/chat/completions", {**body, "stop": [stop]}):
        for choice in chunk["choices"]:
            content = choice["delta"].get("content", "")
            said = (choice["logprobs"] or {}).get("content") or []
            assert b"".join(bytes(entry["bytes"]) for entry in said).decode() == content


def test_echo_begins_with_null(server: Server) -> None:  # B021, B023
    """Combinations: with a warm prefix cache, and n = 2, too."""
    prompt = "\n7. Dana owns 30 and more than a block of the cache holds"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 4, "temperature": 0}
    for more in ({}, {"prompt": list(prompt.encode())}, {"n": 2}):
        for choice in post(server, "/v1/completions", {**body, **more})["choices"]:
            assert choice["text"].startswith(prompt)
            logprobs = choice["logprobs"]
            assert "".join(logprobs["tokens"]) == choice["text"]
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            ids = list(choice["text"].encode())
            said = expected(ids[:1], ids[1:], 1)
            assert logprobs["token_logprobs"][1:] == pytest.approx([one.logprob for one in said])
    warm = post(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    plain = post(server, "/v1/completions", {"prompt": [1, 2, 3, 4, 5], "echo": True})
    assert plain["choices"][0]["text"].startswith("\x01\x02\x03\x04\x05")


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_generates_nothing(server: Server, stream: bool) -> None:
    body = {"prompt": "score me", "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        choice = merged(streamed(server, "/v1/completions", body))[0]
    else:
        answer = post(server, "/v1/completions", body)
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens"] == 0
    assert choice["text"] == "score me"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_is_scored_may_fill_the_context(server: Server, stream: bool) -> None:
    body = {"prompt": [97] * 512, "echo": True, "logprobs": 0, "max_tokens": 0, "n": 2}
    head = {"content-type": "application/json", "x-headrace-record": "full"}
    for _ in range(2):
        if stream:
            choices = list(merged(streamed(server, "/v1/completions", body)).values())
        else:
            status, _, raw = server.request(
                "POST", "/v1/completions", json.dumps(body).encode(), head
            )
            choices, usage = (answer := json.loads(raw))["choices"], answer["usage"]
            assert (status, usage["completion_tokens"]) == (200, 0)
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
        for choice in choices:
            assert choice["text"] == "a" * 512
            assert len(choice["logprobs"]["tokens"]) == 512
    cached = post(server, "/v1/completions", {"prompt": [97] * 512, "max_tokens": 0, "echo": True})
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] == 512
    for prompt, most, told in (
        (513, 0, "the prompt has 513 tokens, but this server holds 512 tokens in all"),
        (512, 1, "the prompt has 512 tokens and 1 more are asked for, but this server holds"),
    ):
        long = {**body, "prompt": [97] * prompt, "max_tokens": most, "stream": stream}
        status, _, raw = server.request("POST", "/v1/completions", json.dumps(long).encode(), head)
        error = json.loads(raw)["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith(told)


def test_prompt_logprobs(server: Server) -> None:
    ids = list(b"a prompt of some length")
    for path, body in (
        ("/v1/completions", {"prompt": ids, "n": 2, "max_tokens": 2}),
        ("/v1/completions", {"prompt": ids, "max_tokens": 0}),
    ):
        answer = post(server, path, {**body, "prompt_logprobs": 2})
        for choice in answer["choices"]:
            first, *rest = choice["prompt_logprobs"]
            assert first is None
            for token, table, want in zip(
                ids[1:], rest, expected(ids[:1], ids[1:], 2), strict=True
            ):
                assert table[str(token)]["logprob"] == pytest.approx(want.logprob)
                assert table[str(token)]["rank"] == want.rank
                assert table[str(token)]["decoded_token"] == chr(token)
                assert set(map(str, want.top_ids)) | {str(token)} == set(table)
    chat = post(
        server, "/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 0, "max_tokens": 1}
    )
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_best_of_shows_the_likeliest(server: Server) -> None:
    """Those with the highest log-probability a token; usage counts all that were drawn."""
    body = {"prompt": "pick", "max_tokens": 8, "temperature": 2.0, "seed": 1, "logprobs": 0}
    every = post(server, "/v1/completions", {**body, "n": 6})
    best = post(server, "/v1/completions", {**body, "n": 2, "best_of": 6})
    assert best["usage"] == every["usage"]

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return math.fsum(values) / len(values)

    ranked = sorted(every["choices"], key=mean, reverse=True)[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    for got, want in zip(best["choices"], ranked, strict=True):
        assert {**got, "index": 0} == {**want, "index": 0}
    plain = post(
        server,
        "/v1/completions",
        {k: v for k, v in body.items() if k != "logprobs"} | {"best_of": 6},
    )
    assert plain["choices"][0]["text"] == ranked[0]["text"]
    assert plain["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("n", [1, 3])
def test_usage_of_every_chunk_counts_up(server: Server, n: int) -> None:  # B087
    body = {"messages": HELLO, "max_tokens": 60, "seed": 1, "n": n, "logprobs": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(server, "/v1/chat/completions", {**body, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    whole = post(server, "/v1/chat/completions", body)
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"]


def computed(server: Server) -> float:
    """Prompt tokens that no cache held, so far."""
    server.wait_idle()
    return server.metric("headrace_prompt_tokens_total") - server.metric(
        "headrace_cached_tokens_total"
    )


def beams_of(prompt: list[int], rules: BeamRules, max_tokens: int) -> BeamSearch:
    """The search on the fake model itself, without an engine."""
    search = BeamSearch(prompt, rules, max_tokens, [END_OF_TURN])
    while not search.done:
        search.feed([expected(known, [0], 2 * rules.width)[0] for known in search.prompts])
    return search


@pytest.mark.parametrize("early", [False, True, "never"])
def test_beams(server: Server, early: Any) -> None:
    """Those of the model itself; an engine with a prefix cache computes little more than once."""
    prompt = "search " * 12
    before = computed(server)
    body = {
        "prompt": prompt,
        "use_beam_search": True,
        "n": 2,
        "beam_width": 4,
        "max_tokens": 9,
        "length_penalty": 0.5,
        "early_stopping": early,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
    }
    answer = post(server, "/v1/completions", body)
    want = beams_of(list(prompt.encode()), BeamRules(4, 0.5, early), 9).best(2)
    for choice, beam in zip(answer["choices"], want, strict=True):
        assert choice["token_ids"] == beam.tokens
        assert choice["finish_reason"] == beam.reason
        assert choice["text"] == bytes(t for t in beam.tokens if t < 256).decode()
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(beam.total)
        assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == sum(len(beam.tokens) for beam in want)
    steps = max(len(beam.tokens) for beam in want) + 1
    assert computed(server) - before <= len(prompt) + 4 * 16 * steps, "a block a beam and step"
    chat = {"messages": HELLO, **{k: v for k, v in body.items() if k not in ("prompt", "logprobs")}}
    said = post(server, "/v1/chat/completions", chat)
    beams = beams_of(said["prompt_token_ids"], BeamRules(4, 0.5, early), 9).best(2)
    assert [choice["token_ids"] for choice in said["choices"]] == [beam.tokens for beam in beams]


def test_a_client_that_leaves_a_search_frees_the_engine(server: Server) -> None:
    body = json.dumps({
        "prompt": "long", "use_beam_search": True, "n": 8, "max_tokens": 400, "ignore_eos": True,
    })  # fmt: skip
    gone = partial(server.metric, "headrace_requests_total", status="499")
    started = partial(server.metric, "headrace_requests_started_total")
    before, begun = gone(), started()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    head = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", body, head)
    server.wait(lambda: started() > begun, "its first steps")
    connection.close()
    server.wait(lambda: gone() == before + 1, "its end")
    server.wait_idle()
    steps = server.metric("headrace_steps_total")
    time.sleep(0.3)
    assert server.metric("headrace_steps_total") == steps, "the search goes on without its client"
    assert post(server, "/v1/completions", {"prompt": "next", "max_tokens": 2})["choices"]

"""One server, many requests: answers, streams, usage, and every way to be refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.fake.model import reference
from headrace.messages import Sampling
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import load_tokenizer
from tests.e2e.processes import MAX_MODEL_LEN
from tests.e2e.serving import Server, events

FAKE = load_tokenizer(ModelFiles("fake", "fake", Path()))
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(max_body_bytes=200_000, fake_step_ms=0.2) as running:
        yield running
        running.wait_idle()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def stream(server: Server, path: str, body: dict[str, Any]) -> tuple[dict[int, str], list[Any]]:
    """Text by choice, and all events; checks what every stream must hold."""
    status, headers, raw = server.request("POST", path, {**body, "stream": True})
    assert status == 200, raw
    assert headers["content-type"].startswith("text/event-stream")
    found = events(raw)
    assert found[-1] == "[DONE]"
    texts: dict[int, str] = {}
    finished: dict[int, str] = {}
    for event in found[:-1]:
        assert set(event) >= {"id", "object", "created", "model", "choices"}
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in finished, "nothing comes after the finish chunk"
            text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            if path == CHAT and index not in texts:
                assert choice["delta"] == {"role": "assistant", "content": ""}
            texts[index] = texts.get(index, "") + text
            if choice["finish_reason"] is not None:
                finished[index] = choice["finish_reason"]
    assert finished.keys() == texts.keys()
    return texts, found[:-1]


def whole(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = server.post(path, body)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


def text_of(choice: dict[str, Any]) -> str:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert isinstance(text, str)
    return text


def test_greedy_text_is_what_the_model_says(server: Server) -> None:
    prompt = "The quick brown fox"
    ids = reference(list(prompt.encode()), Sampling(temperature=0), 0, 40, eos=None)
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = whole(server, TEXT, body)
    shown = FAKE.decode([token for token in ids if token < 256])
    assert text_of(answer["choices"][0]).replace("�", "") == shown.replace("�", "")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", [None, "e", ["t a", "ing", "o"]])
def test_streamed_and_whole_answers_are_equal(server: Server, path: str, n: int, stop: Any) -> None:
    body: dict[str, Any] = {"seed": 11, "n": n, "stop": stop, "max_tokens": 60, "temperature": 1.3}
    body |= {"messages": user("hello")} if path == CHAT else {"prompt": "hello"}
    answer = whole(server, path, body)
    options = {"stream_options": {"include_usage": True}}
    texts, chunks = stream(server, path, {**body, **options})
    assert texts == {choice["index"]: text_of(choice) for choice in answer["choices"]}
    assert chunks[-1]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert {k: chunks[-1]["usage"][k] for k in counts} == {k: answer["usage"][k] for k in counts}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    ends = {c["index"]: c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
    for choice in answer["choices"]:
        end = ends[choice["index"]]
        assert end["finish_reason"] == choice["finish_reason"]
        assert end["stop_reason"] == choice["stop_reason"]
        for string in [stop] if isinstance(stop, str) else stop or []:
            assert string not in text_of(choice)


def test_usage_comes_only_when_asked_for(server: Server) -> None:
    _, chunks = stream(server, CHAT, {"messages": user("a"), "max_tokens": 3})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    continuous = {"continuous_usage_stats": True}
    _, chunks = stream(
        server, CHAT, {"messages": user("a"), "max_tokens": 3, "stream_options": continuous}
    )
    assert all("usage" not in chunk for chunk in chunks), "no effect without include_usage"


@pytest.mark.parametrize("n", [1, 3])
def test_usage_in_every_chunk_rises_to_the_final_one(server: Server, n: int) -> None:
    body = {"messages": user("a"), "max_tokens": 20, "n": n, "seed": 3, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = stream(server, CHAT, {**body, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]  # role chunks, too
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 20 * n == whole(server, CHAT, body)["usage"]["completion_tokens"]
    echoed = {"prompt": ["a", "b"], "max_tokens": 4, "n": n, "echo": True, "return_token_ids": True}
    _, chunks = stream(server, TEXT, {**echoed, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0


def test_choices_of_several_prompts(server: Server) -> None:
    body = {"prompt": ["one apple", "two pears"], "n": 2, "echo": True, "max_tokens": 5, "seed": 1}
    answer = whole(server, TEXT, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [text_of(choice) for choice in answer["choices"]]
    assert [text[:9] for text in texts] == ["one apple"] * 2 + ["two pears"] * 2
    assert answer["usage"]["prompt_tokens"] == 18
    streamed, _ = stream(server, TEXT, body)
    assert [streamed[index] for index in range(4)] == texts
    ids = [list(b"one apple"), list(b"two pears")]
    assert [text_of(c) for c in whole(server, TEXT, {**body, "prompt": ids})["choices"]] == texts
    alone = whole(server, TEXT, {**body, "prompt": "two pears"})
    assert [text_of(choice) for choice in alone["choices"]] == texts[2:]


def test_seeds(server: Server) -> None:
    def texts(seed: int | None, n: int = 1) -> list[str]:
        body = {"prompt": "dice", "seed": seed, "n": n, "max_tokens": 30, "ignore_eos": True}
        return [text_of(choice) for choice in whole(server, TEXT, body)["choices"]]

    assert texts(42) == texts(42)
    assert texts(42) != texts(43)
    assert len({texts(None)[0] for _ in range(3)}) == 3
    assert len(set(texts(42, n=4))) == 4
    assert texts(42, n=4)[0] == texts(42)[0]
    assert texts(-1) == texts(-1)


def test_zero_temperature_and_its_equals(server: Server) -> None:
    def text(**fields: Any) -> str:
        body = {"prompt": "limit", "max_tokens": 20, "seed": 5, **fields}
        return text_of(whole(server, TEXT, body)["choices"][0])

    greedy = text(temperature=0)
    assert text(temperature=1.5, top_k=1) == greedy
    assert text(temperature=1.5, top_p=0) == greedy
    assert text(temperature=1.5, top_p=1e-9) == greedy
    assert text(temperature=1.5, min_p=1) == greedy
    free = text(temperature=1.5)
    assert free != greedy
    assert text(temperature=1.5, top_k=0) == free
    assert text(temperature=1.5, top_k=-1) == free
    assert text(temperature=1.5, top_k=9_999_999) == free


def test_cached_tokens_are_told_in_both_modes(server: Server) -> None:
    """B088."""

    def cached(salt: str | None, streamed: bool) -> int:
        body = {"prompt": "shared " * 40, "max_tokens": 2, "cache_salt": salt}
        if streamed:
            options = {"stream_options": {"include_usage": True}}
            usage = stream(server, TEXT, {**body, **options})[1][-1]["usage"]
        else:
            usage = whole(server, TEXT, body)["usage"]
        assert usage["prompt_tokens"] == 280
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("s1", False) == 0
    assert 0 < cached("s1", False) == cached("s1", True) <= 280
    assert cached("s2", True) == 0
    assert cached(None, False) == 0


def test_one_token(server: Server) -> None:
    answer = whole(server, CHAT, {"messages": user("x"), "max_tokens": 1, "ignore_eos": True})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1


def test_chat_runs_to_its_end_of_turn_by_default(server: Server) -> None:
    answer = whole(server, CHAT, {"messages": user("a long story"), "temperature": 1.0, "seed": 1})
    choice, usage = answer["choices"][0], answer["usage"]
    if choice["finish_reason"] == "length":
        assert usage["total_tokens"] == MAX_MODEL_LEN
    else:
        assert choice["finish_reason"] == "stop"
        assert "<|im_end|>" not in text_of(choice)


def test_stop_token_ids(server: Server) -> None:
    free = {"prompt": "abc", "max_tokens": 60, "seed": 9, "ignore_eos": True}
    text = text_of(whole(server, TEXT, free)["choices"][0])
    letter = text[10]
    answer = whole(server, TEXT, {**free, "stop_token_ids": [ord(letter)]})
    choice = answer["choices"][0]
    assert text_of(choice) == text[: text.index(letter)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord(letter))
    assert answer["usage"]["completion_tokens"] == text.index(letter) + 1
    shown = whole(
        server, TEXT, {**free, "stop_token_ids": [ord(letter)], "include_stop_str_in_output": True}
    )
    assert text_of(shown["choices"][0]) == text[: text.index(letter) + 1]


def test_continue_final_message(server: Server) -> None:
    messages = [*user("count"), {"role": "assistant", "content": "one, two"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    resumed = whole(server, CHAT, {**body, "continue_final_message": True})
    rendered = whole_ids(server, {"messages": messages, "continue_final_message": True})
    assert FAKE.decode(rendered, skip_special=False).endswith("one, two")
    raw = whole(server, TEXT, {**body, "prompt": rendered})
    assert text_of(resumed["choices"][0]) == text_of(raw["choices"][0])


def whole_ids(server: Server, body: dict[str, Any]) -> list[int]:
    status, answer = server.post("/tokenize", body)
    assert status == 200, answer
    assert answer["count"] == len(answer["tokens"])
    return list(answer["tokens"])


def test_tokenize_and_back(server: Server) -> None:
    ids = whole_ids(server, {"prompt": "né 🐙<|im_end|>"})
    assert ids[-1] == 258
    assert server.post("/detokenize", {"tokens": ids}) == (200, {"prompt": "né 🐙<|im_end|>"})
    assert server.post("/detokenize", {"tokens": [259]})[0] == 400
    assert server.post("/tokenize", {})[0] == 400
    answer = server.post("/tokenize", {"prompt": "ab", "return_token_strs": True})[1]
    assert answer["token_strs"] == ["a", "b"]
    assert answer["max_model_len"] == MAX_MODEL_LEN


def test_models_version_and_ids(server: Server) -> None:
    status, models = server.get("/v1/models")
    assert status == 200
    assert [card["id"] for card in models["data"]] == ["fake"]
    assert models["data"][0]["kv_tokens"] >= MAX_MODEL_LEN
    assert server.get("/v1/models/fake") == (200, models["data"][0])
    assert server.get("/v1/models/other/name")[0] == 404
    for path, meant in (("/models", "/v1/models"), ("/v1/metrics", "/metrics"), ("/x", "/openapi")):
        status, lost = server.get(path)
        assert (status, lost["error"]["code"]) == (404, "route_not_found")
        assert meant in lost["error"]["message"]
    assert "version" in server.get("/version")[1]
    sent = {"x-request-id": "abc-123"}
    assert server.request("GET", "/health", headers=sent)[1]["x-request-id"] == "abc-123"
    made = server.request("GET", "/health", headers={"x-request-id": "bad id\t" + "x" * 200})[1]
    assert made["x-request-id"].startswith("req-")


BAD = [
    ("POST", CHAT, {"messages": []}, 400, "messages"),
    ("POST", CHAT, {}, 400, "messages"),
    ("POST", CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages"),
    ("POST", CHAT, {"messages": user("x"), "model": "gpt-5"}, 404, "model"),
    ("POST", CHAT, {"messages": user("x"), "n": 65}, 400, "n"),
    ("POST", CHAT, {"messages": user("x"), "n": 5_000_000}, 400, "n"),
    ("POST", CHAT, {"messages": user("x"), "max_tokens": 10**9}, 400, "messages"),
    ("POST", CHAT, {"messages": user("x"), "priority": 1}, 400, "priority"),
    ("POST", CHAT, {"messages": user("x"), "stop_token_ids": [259]}, 400, "stop_token_ids"),
    ("POST", CHAT, {"messages": user("x"), "tools": [{}]}, 400, "tools[0]"),
    ("POST", CHAT, {"messages": user("x"), "chat_template_kwargs": {"messages": 1}}, 400,
     "chat_template_kwargs"),
    ("POST", CHAT, {"messages": user("x"), "continue_final_message": True}, 400, "messages"),
    ("POST", CHAT, {"messages": user("x"), "max_tokens": 1, "max_completion_tokens": 2}, 400,
     "max_completion_tokens"),
    ("POST", TEXT, {"prompt": ""}, 400, "prompt"),
    ("POST", TEXT, {"prompt": ["a", ""]}, 400, "prompt"),
    ("POST", TEXT, {"prompt": []}, 400, "prompt"),
    ("POST", TEXT, {"prompt": [-1]}, 400, "prompt"),
    ("POST", TEXT, {"prompt": [[259]]}, 400, "prompt"),
    ("POST", TEXT, {"prompt": "x " * 6000}, 400, "prompt"),
    ("POST", TEXT, {"prompt": ["a"] * 1024, "n": 64}, 400, "prompt"),
    ("POST", TEXT, {}, 400, "prompt"),
    ("POST", TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("POST", TEXT, {"prompt": "x", "logprobs": 6}, 400, "logprobs"),
    ("POST", TEXT, b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    ("POST", TEXT, b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
    ("POST", TEXT, b"{", 400, None),
    ("POST", TEXT, b"", 400, None),
    ("POST", TEXT, b"\xff\xfe", 400, None),
    ("POST", TEXT, b"[" * 50_000, 400, None),
    ("POST", TEXT, b'{"prompt": "' + b"x" * 300_000 + b'"}', 413, None),
    ("GET", TEXT, None, 405, None),
    ("DELETE", "/v1/models", None, 405, None),
    ("GET", "/v1/nothing", None, 404, None),
    ("GET", "/%ff%00", None, 404, None),
]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("method", "path", "body", "status", "param"), BAD)
def test_refusals(
    server: Server, method: str, path: str, body: Any, status: int, param: str | None,
    streamed: bool,
) -> None:  # fmt: skip
    if isinstance(body, dict) and streamed:
        body = {**body, "stream": True}
    got, headers, raw = server.request(method, path, body)
    assert got == status, raw[:300]
    assert headers["content-type"] == "application/json"
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    assert error["code"]


def test_a_prompt_that_never_fits_names_both_numbers(server: Server) -> None:
    status, answer = server.post(TEXT, {"prompt": "x" * 5000, "max_tokens": 7})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "5000" in answer["error"]["message"]
    assert "7" in answer["error"]["message"]
    assert str(MAX_MODEL_LEN) in answer["error"]["message"]
    just = {"prompt": "x" * (MAX_MODEL_LEN - 1), "max_tokens": 1, "ignore_eos": True}
    assert whole(server, TEXT, just)["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert server.post(TEXT, {**just, "max_tokens": 2})[0] == 400


def test_refused_requests_leave_nothing_behind(server: Server) -> None:
    """B048."""
    for _ in range(50):
        assert server.post(TEXT, {"prompt": "y" * 5000})[0] == 400
    server.wait_idle()


def test_media_types(server: Server) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for media, status in [
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
    ]:
        assert server.request("POST", TEXT, body, {"content-type": media})[0] == status


def test_unknown_fields_are_named_in_a_header(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1, "banana": 1, "é": 2, "user": "u"}
    for streamed in (False, True):
        status, headers, _ = server.request("POST", TEXT, {**body, "stream": streamed})
        assert status == 200
        assert headers["x-headrace-ignored-fields"] == "banana, ?"


def test_every_accepted_request_is_counted_once(server: Server) -> None:
    server.wait_idle()
    started = server.metric("headrace_requests_started_total")
    finished = server.metric("headrace_requests_finished_total")
    assert started == finished
    http = server.metric("headrace_requests_total", endpoint=TEXT, status="200")
    server.post(TEXT, {"prompt": ["x", "y"], "max_tokens": 2})
    server.wait_idle()
    assert server.metric("headrace_requests_total", endpoint=TEXT, status="200") == http + 1
    assert server.metric("headrace_requests_started_total") == started + 2
    assert server.metric("headrace_requests_finished_total") == finished + 2
    assert server.metric("headrace_ttft_seconds_count") > 0
    assert server.metric("vllm:time_to_first_token_seconds_count") > 0
    assert server.metric("vllm:cache_config_info", block_size="16") == 1


def test_many_at_once_equal_one_at_a_time(server: Server) -> None:
    bodies = [{"prompt": f"prompt {i}", "max_tokens": 30, "seed": i} for i in range(24)]
    alone = [text_of(whole(server, TEXT, body)["choices"][0]) for body in bodies]
    with ThreadPoolExecutor(24) as pool:
        crowd = list(pool.map(lambda body: stream(server, TEXT, body)[0][0], bodies))
    assert crowd == alone

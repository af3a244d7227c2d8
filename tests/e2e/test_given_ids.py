"""Prompts that come with their tokens: taken from who has the same tokenizer, else made anew."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.gateway.tokenising import load_models
from tests.e2e.serving import Server

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a headrace leads water"}],
    "max_tokens": 5,
    "temperature": 0,
    "return_token_ids": True,
}
TEXT: dict[str, Any] = {"prompt": "a headrace", "max_tokens": 5, "temperature": 0, "echo": True}


def identity(server: Server) -> str:
    status, models = server.get("/v1/models")
    assert status == 200
    found: str = models["data"][0]["tokenizer"]
    assert len(found) == 32
    return found


def given(server: Server, outcome: str) -> float:
    return server.metric("headrace_given_prompts_total", outcome=outcome)


def test_the_same_tokens_are_taken_and_give_the_same_answer(shared_server: Server) -> None:
    server = shared_server
    _, plain = server.post("/v1/chat/completions", CHAT)
    ids = plain["prompt_token_ids"]
    before = given(server, "taken")
    field = {"tokenizer": identity(server), "ids": ids}
    status, headers, _ = server.request(
        "POST", "/v1/chat/completions", CHAT | {"prompt_ids": field}
    )
    assert (status, "x-headrace-ignored-fields" in headers) == (200, False)
    _, with_ids = server.post("/v1/chat/completions", CHAT | {"prompt_ids": field})
    assert with_ids["choices"][0]["message"] == plain["choices"][0]["message"]
    assert with_ids["usage"]["prompt_tokens"] == len(ids)
    assert given(server, "taken") == before + 2
    # Nothing is tokenised: other tokens than those of the messages are what is read.
    field = {"tokenizer": identity(server), "ids": [104, 105]}
    _, other = server.post("/v1/chat/completions", CHAT | {"prompt_ids": field})
    assert (other["prompt_token_ids"], other["usage"]["prompt_tokens"]) == ([104, 105], 2)


def test_completions_too(shared_server: Server) -> None:
    field = {"tokenizer": identity(shared_server), "ids": list(b"a headrace")}
    _, plain = shared_server.post("/v1/completions", TEXT)
    _, with_ids = shared_server.post("/v1/completions", TEXT | {"prompt_ids": field})
    assert with_ids["choices"] == plain["choices"]


SAID = CHAT["messages"]


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/messages", {"messages": SAID, "max_tokens": 5}, "input_tokens"),
        ("/v1/responses", {"input": SAID, "max_output_tokens": 16}, "input_tokens"),
    ],
)
def test_other_conversations_too(
    shared_server: Server, path: str, body: dict[str, Any], count: str
) -> None:
    """What the gateway makes of a body is taken, and it is what the server makes of it."""
    server = shared_server
    ids = load_models(["m=fake"], 2**20, print)["m"].read(path, json.dumps(body).encode())
    assert not isinstance(ids, str)
    before = given(server, "taken")
    field = {"tokenizer": identity(server), "ids": ids.tolist()}
    _, plain = server.post(path, body | {"temperature": 0})
    _, with_ids = server.post(path, body | {"temperature": 0, "prompt_ids": field})
    said = "output" if "output" in plain else "content"
    for answer in (plain, with_ids):
        usage = answer["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        assert usage["input_tokens"] + cached == len(ids)
    texts = [str(answer[said][0].get("text") or answer[said][0]["content"][0]["text"])
             for answer in (plain, with_ids)]  # fmt: skip
    assert texts[0] == texts[1] != ""
    assert given(server, "taken") == before + 1
    status, refused = server.post(path, body | {"prompt_ids": {"tokenizer": "x", "ids": []}})
    assert status == 400
    assert "prompt_ids" in refused["error"]["message"]


def test_ids_cannot_stand_for_what_was_said_before(shared_server: Server) -> None:
    field = {"tokenizer": identity(shared_server), "ids": [1]}
    body = {"input": "hi", "previous_response_id": "resp_1", "prompt_ids": field}
    status, said = shared_server.post("/v1/responses", body)
    assert (status, said["error"]["param"]) == (400, "prompt_ids")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_foreign_tokens_are_not_read(shared_server: Server, path: str) -> None:
    """Those of another tokenizer are passed over, and the answer says so."""
    body = CHAT if "chat" in path else TEXT
    before = given(shared_server, "other_tokenizer")
    field = {"tokenizer": "0" * 32, "ids": [104, 105]}
    status, headers, _ = shared_server.request("POST", path, body | {"prompt_ids": field})
    assert (status, headers["x-headrace-ignored-fields"]) == (200, "prompt_ids")
    _, plain = shared_server.post(path, body)
    _, other = shared_server.post(path, body | {"prompt_ids": field})
    assert other["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] > 2
    assert given(shared_server, "other_tokenizer") == before + 2


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/chat/completions", {"prompt_ids": {"tokenizer": "x", "ids": []}}, "prompt_ids.ids"),
        ("/v1/chat/completions", {"prompt_ids": {"ids": [1]}}, "prompt_ids"),
        ("/v1/chat/completions", {"prompt_ids": {"tokenizer": "x", "ids": [-1]}}, "prompt_ids.ids"),
        ("/v1/chat/completions", {"chat_template": "x"}, "prompt_ids"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt_ids"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt_ids"),
    ],
)
def test_what_cannot_be(shared_server: Server, path: str, more: dict[str, Any], param: str) -> None:
    field = {"tokenizer": identity(shared_server), "ids": [1]}
    body = (CHAT if "chat" in path else TEXT) | {"prompt_ids": field} | more
    status, said = shared_server.post(path, body)
    assert status == 400
    assert said["error"]["param"].startswith(param)


def test_an_id_out_of_the_vocabulary(shared_server: Server) -> None:
    field = {"tokenizer": identity(shared_server), "ids": [104, 2**31]}
    status, said = shared_server.post("/v1/chat/completions", CHAT | {"prompt_ids": field})
    assert (status, said["error"]["param"]) == (400, "prompt_ids")

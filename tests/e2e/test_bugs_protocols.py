"""Faults seen in other servers, by their numbers, through /v1/responses and /v1/messages."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.conftest import CONTEXT_TOKENS
from tests.e2e.serving import Server

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
LIMIT = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
BOTH = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server


def body(path: str, text: Any = "hi", limit: Any = 20, **more: Any) -> dict[str, Any]:
    asked = (
        {"input": text} if path == RESPONSES else {"messages": [{"role": "user", "content": text}]}
    )
    return {**asked, **({LIMIT[path]: limit} if path in LIMIT else {}), **more}


def saying(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": re.escape(text)}}


def whole(server: Server, path: str, asked: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Text, how it ended, usage."""
    status, answer = server.post(path, asked)
    assert status == 200, answer
    if path == MESSAGES:
        text = "".join(block["text"] for block in answer["content"])
        return text, answer["stop_reason"], answer["usage"]
    text = "".join(item["content"][0]["text"] for item in answer["output"])
    return text, answer["status"], answer["usage"]


def streamed(server: Server, path: str, asked: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """The same of a stream."""
    status, _, raw = server.request("POST", path, {**asked, "stream": True})
    assert status == 200, raw
    datas = [json.loads(line[6:]) for line in raw.decode().split("\n") if line[:6] == "data: "]
    if path == MESSAGES:
        deltas = [d["delta"]["text"] for d in datas if d["type"] == "content_block_delta"]
        last = datas[-2]
        return "".join(deltas), last["delta"]["stop_reason"], last["usage"]
    deltas = [d["delta"] for d in datas if d["type"] == "response.output_text.delta"]
    last = datas[-1]["response"]
    return "".join(deltas), last["status"], last["usage"]


@BOTH
def test_b002_a_limit_inside_a_character(server: Server, path: str) -> None:
    said = "né 🐙 漢字 end"
    for limit in range(1, len(said.encode()) + 1):
        asked = body(path, limit=limit, **saying(said))
        text, end, _ = whole(server, path, asked)
        assert streamed(server, path, asked)[:2] == (text, end)
        assert said.startswith(text.removesuffix("\ufffd"))


@BOTH
def test_b003_bytes_that_are_no_characters(server: Server, path: str) -> None:
    asked = body(path, logit_bias={"196": 100})
    text, _, _ = whole(server, path, asked)
    assert set(text) == {"\ufffd"}
    assert streamed(server, path, asked)[0] == text


@BOTH
def test_b006_the_last_character(server: Server, path: str) -> None:
    text, _, _ = streamed(server, path, body(path, limit=50, **saying("fin 🫠")))
    assert text == "fin 🫠"


@BOTH
def test_b044_to_b048_lengths(server: Server, path: str) -> None:
    for text in ("x" * 3 * CONTEXT_TOKENS, "Reply with PLUM. " + "x " * CONTEXT_TOKENS):
        for stream in (False, True):
            status, answer = server.post(path, body(path, text, stream=stream))
            assert status == 400
            assert str(CONTEXT_TOKENS) in answer["error"]["message"]
    assert whole(server, path, body(path, ""))[2]["output_tokens"] > 0
    for limit in (0, -1, "5", 1.5, 2**70):
        assert server.post(path, body(path, limit=limit))[0] == 400, limit
    assert whole(server, path, body(path, limit=1, ignore_eos=True))[2]["output_tokens"] == 1
    server.wait_idle()


HOSTILE = [
    b"", b"null", b"[]", b'"x"', b"{", b'{"input": ', b'{"a": NaN}', b'{"input": "\\ud800"}',
    b'{"input": "\xff"}', b'{"previous_response_id": "\\u0000"}', b'{"model": {}}',
    b'{"input": {"a": 1}}', b'{"input": [1]}', b'{"input": [[]]}', b'{"input": [{"type": []}]}',
    b'{"input": [{"role": [], "content": {}}]}', b'{"input": "x", "tools": [{}]}',
    b'{"input": "x", "tools": [{"type": "function"}]}', b'{"input": "x", "text": {"format": []}}',
    b'{"input": "x", "tool_choice": {"type": "function", "name": 3}}',
    b'{"max_tokens": 9, "messages": [{"role": "user", "content": [[]]}]}',
    b'{"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": []}]}]}',
    b'{"max_tokens": 9, "messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}',
    b'{"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}',
    b'{"max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "tools": [{}]}',
    b'{"max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "tools": [{"type": []}]}',
    *(
        b'{"max_tokens": 9, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", '
        b'"content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}, {"role": "user",'
        b' "content": [{"type": "tool_result", "tool_use_id": "t", %b}]}]}' % member
        for member in (b'"is_error": "no"', b'"content": false', b'"content": 0')
    ),
    b'{"max_tokens": 1e999, "messages": []}', b'{"messages": [{"role": "user", "content": []}]}',
]  # fmt: skip


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, COUNT])
def test_b047_hostile_bodies(server: Server, path: str) -> None:
    for raw in HOSTILE:
        status, _, said = server.request("POST", path, raw)
        answer = json.loads(said)
        assert 400 <= status < 500 or (status, path) == (200, COUNT), (raw, answer)
        if status != 200:
            assert answer["error"]["message"]
            assert ("type" in answer) == (path != RESPONSES)


def test_deep_nesting_is_no_fault_of_ours(server: Server) -> None:
    for depth in (100, 480, 490, 500, 900, 990, 1000, 1100, 5000):
        deep = b"[" * depth + b"]" * depth
        for raw in (
            b'{"input": [{"role": "user", "content": "x", "more": %b}]}' % deep,
            b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": %b}}]}'
            % deep,
        ):
            for stream in (b"", b', "stream": true'):
                asked = raw[:-1] + b', "max_output_tokens": 2' + stream + b"}"
                status, _, said = server.request("POST", RESPONSES, asked)
                assert status in (200, 400), (depth, said[:300])
                assert b"response.failed" not in said, depth


@BOTH
def test_b088_cached_tokens_in_both_modes(server: Server, path: str) -> None:
    def cached(usage: dict[str, Any]) -> int:
        if path == MESSAGES:
            return int(usage["cache_read_input_tokens"])
        return int(usage["input_tokens_details"]["cached_tokens"])

    asked = body(path, f"{path} " + "once more " * 60, cache_salt=f"b088 {path}")
    first = whole(server, path, asked)[2]
    second, third = whole(server, path, asked)[2], streamed(server, path, asked)[2]
    assert cached(first) == 0
    assert cached(second) == cached(third) > 500
    total = {
        u["input_tokens"] + (cached(u) if path == MESSAGES else 0) for u in (first, second, third)
    }
    assert len(total) == 1, "the prompt is as long as it is"


HARMLESS: dict[str, dict[str, Any]] = {
    RESPONSES: {
        "user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "store": True, "tools": [],
        "parallel_tool_calls": True, "text": {"format": {"type": "text"}}, "include": [],
        "truncation": "disabled", "background": False, "reasoning": {}, "safety_identifier": "s",
    },
    MESSAGES: {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "tools": [], "system": [],
        "stop_sequences": [], "thinking": {"type": "disabled"},
    },
}  # fmt: skip


@BOTH
def test_harmless_fields_cause_no_error(server: Server, path: str) -> None:
    status, answer = server.post(path, {**body(path), **HARMLESS[path]})
    assert status == 200, answer

"""A conversation is found in the cache up to its first difference, by every protocol."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest

from tests.e2e.serving import Server

BLOCK = 16
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
Turns = list[dict[str, Any]]


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server


def ids(server: Server, turns: Turns) -> list[int]:
    status, answer = server.post("/tokenize", {"messages": turns})
    assert status == 200
    found: list[int] = answer["tokens"]
    return found


def ask(server: Server, path: str, turns: Turns, **more: Any) -> tuple[int, str]:
    """Cached tokens of the prompt, and the answer."""
    key, limit = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    status, answer = server.post(
        path, {key: turns, limit: 20, "ignore_eos": True, "temperature": 0, **more}
    )
    assert status == 200, answer
    usage = answer["usage"]
    if path == CHAT:
        text = answer["choices"][0]["message"]["content"]
        return usage["prompt_tokens_details"]["cached_tokens"], text
    if path == MESSAGES:
        return usage["cache_read_input_tokens"], answer["content"][0]["text"]
    return usage["input_tokens_details"]["cached_tokens"], answer["output"][0]["content"][0]["text"]


def shared(one: list[int], other: list[int]) -> int:
    """Tokens of whole blocks before the first difference."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return same // BLOCK * BLOCK


def conversation(salt: str, turns: int = 8) -> Turns:
    """Of many blocks; `salt` makes it unlike those of other tests from its start."""
    said = [{"role": "user", "content": f"{salt} asks"}]
    for i in range(turns):
        said.append({"role": "assistant", "content": f"answer {i}: " + "tell me more. " * (i + 1)})
        said.append({"role": "user", "content": f"question {i}: " + "and why is that? " * (i + 1)})
    return said


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("at", [0, 5, 10, 16])
def test_an_edited_message(server: Server, path: str, at: int) -> None:
    turns = conversation(f"{path} {at}")
    ask(server, path, turns)
    edited = [dict(turn) for turn in turns]
    edited[at]["content"] = edited[at]["content"][:-4] + "else"
    expected = shared(ids(server, turns), ids(server, edited))
    assert ask(server, path, edited)[0] == expected
    if at >= 5:
        assert expected > 0
    assert ask(server, path, turns)[0] >= expected, "the first one is still there"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_the_next_turn_reuses_the_answer_too(server: Server, path: str) -> None:
    turns = conversation(f"next {path}", 2)
    _, text = ask(server, path, turns)
    more = [*turns, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    before, after = ids(server, turns), ids(server, more)
    computed = [*before, *text.encode()][:-1]  # a token is a byte; nothing follows the last one
    assert after[: len(computed)] == computed
    assert ask(server, path, more)[0] == shared(computed, after)


def test_a_chain_of_responses_reuses_what_the_whole_input_would(server: Server) -> None:
    body = {
        "input": "once upon " * 8,
        "max_output_tokens": 20,
        "ignore_eos": True,
        "temperature": 0,
    }
    _, first = server.post(RESPONSES, body)
    _, second = server.post(
        RESPONSES, {**body, "input": "go on", "previous_response_id": first["id"]}
    )
    text = first["output"][0]["content"][0]["text"]
    before = ids(server, [{"role": "user", "content": body["input"]}])
    after = ids(server, [
        {"role": "user", "content": body["input"]}, {"role": "assistant", "content": text},
        {"role": "user", "content": "go on"},
    ])  # fmt: skip
    assert second["usage"]["input_tokens"] == len(after)
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == shared([*before, *text.encode()][:-1], after)

"""/v1/messages with Anthropic's own client, on the fake model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.e2e.conftest import CONTEXT_TOKENS
from tests.e2e.serving import Server

PATH = "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="any", max_retries=0) as made:
        yield made


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    return str(block.text)


def test_whole_and_streamed_are_the_same(client: Anthropic) -> None:
    fields: dict[str, Any] = {"model": "fake", "max_tokens": 40, "messages": HI}
    whole = client.messages.create(**fields, extra_body={"seed": 4})
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "fake")
    assert whole.stop_reason in ("max_tokens", "end_turn")
    with client.messages.stream(**fields, extra_body={"seed": 4}) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert text_of(streamed) == text_of(whole) != ""
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.stop_reason == whole.stop_reason
    read = whole.usage.cache_read_input_tokens or 0
    assert (
        read + whole.usage.input_tokens
        == client.messages.count_tokens(model="fake", messages=HI).input_tokens
    )
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_the_order_of_events(server: Server) -> None:
    body = {"model": "fake", "max_tokens": 20, "messages": HI, "stream": True, "seed": 4}
    status, headers, raw = server.request("POST", PATH, body)
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    found = [block.split("\n") for block in raw.decode().strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in found]
    datas = [json.loads(data.removeprefix("data: ")) for _, data in found]
    assert [data["type"] for data in datas] == names
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert datas[-2]["usage"]["output_tokens"] == 20


def test_stop_reasons(client: Anthropic) -> None:
    def ask(**fields: Any) -> anthropic.types.Message:
        extra = fields.pop("extra_body", {})
        message: anthropic.types.Message = client.messages.create(
            model="fake", messages=HI, extra_body={"seed": 1, **extra}, **fields
        )
        return message

    text = text_of(ask(max_tokens=30, extra_body={"ignore_eos": True}))
    cut = ask(max_tokens=30, stop_sequences=[text[9:12]])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", text[9:12])
    assert text_of(cut) == text[: text.index(text[9:12])]
    assert ask(max_tokens=3).stop_reason == "max_tokens"
    full = ask(max_tokens=20_000, extra_body={"ignore_eos": True})
    assert full.stop_reason == "model_context_window_exceeded"
    assert (
        full.usage.input_tokens
        + (full.usage.cache_read_input_tokens or 0)
        + (full.usage.output_tokens)
        == CONTEXT_TOKENS
    )


def test_a_prefilled_answer_goes_on(client: Anthropic, server: Server) -> None:
    turns: list[Any] = [*HI, {"role": "assistant", "content": "I say"}]
    whole = client.messages.create(
        model="fake", max_tokens=9, messages=turns, extra_body={"seed": 1}
    )
    status, chat = server.post(
        "/v1/chat/completions",
        {"messages": turns, "max_tokens": 9, "seed": 1, "continue_final_message": True},
    )
    assert status == 200
    assert text_of(whole) == chat["choices"][0]["message"]["content"]


def test_system_and_blocks_render_as_chat_does(client: Anthropic, server: Server) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    count = client.messages.count_tokens(
        model="fake",
        system=[{"type": "text", "text": "Be brief.", **cached}],  # type: ignore[typeddict-item]
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ],
    ).input_tokens
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    within = server.post(PATH + "/count_tokens", {"messages": turns})[1]["input_tokens"]
    assert within == count
    assert count == server.post("/tokenize", {"messages": turns})[1]["count"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text: a string"),
        ({"system": 3}, "system"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "type"),
        ({"min_tokens": 20}, "min_tokens"),
    ],
)  # fmt: skip
def test_refusals_have_their_shape(server: Server, fields: Any, named: str) -> None:
    status, answer = server.post(PATH, {"max_tokens": 5, "messages": HI, **fields})
    assert status == 400, answer
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]
    assert answer["request_id"].startswith("req-")


def test_errors_are_the_clients_own_classes(client: Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.create(model="other", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match=str(CONTEXT_TOKENS)):  # B044, B045
        client.messages.create(
            model="fake", max_tokens=5, messages=[{"role": "user", "content": "x" * 5000}]
        )
    with pytest.raises(anthropic.RequestTooLargeError) as large:
        client.messages.create(
            model="fake", max_tokens=5, messages=[{"role": "user", "content": "x" * 200_000}]
        )
    assert isinstance(large.value.body, dict)
    assert large.value.body["error"]["type"] == "request_too_large"
    for raw in (b"{", b"[]", b'{"max_tokens": 1e999}'):  # B047
        status, _, body = server.request("POST", PATH, raw)
        assert (status, json.loads(body)["type"]) == (400, "error")
    status, answer = server.get(PATH)
    assert (status, answer["type"]) == (405, "error")


def test_unknown_fields_are_named(server: Server) -> None:
    body = {"max_tokens": 5, "messages": HI, "banana": 1, "metadata": {"user_id": "u"}}
    status, headers, _ = server.request("POST", PATH, body)
    assert (status, headers["x-headrace-ignored-fields"]) == (200, "banana")

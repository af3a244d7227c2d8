"""Reasoning and tool calls through /v1/responses and /v1/messages, there and back again."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.e2e.serving import Server

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city":"Rome"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SAID = f"<think>Let me see.</think>I look.\n{CALL}\n{OTHER}"
HI: list[Any] = [{"role": "user", "content": "Weather?"}]


@pytest.fixture
def server(thinking_server: Server) -> Server:
    return thinking_server


def saying(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": re.escape(text).replace("\\\n", "\\n")}}


def for_responses() -> dict[str, Any]:
    named = [{"name": "get", "parameters": SCHEMA}, {"name": "now", "parameters": {}}]
    return {
        "model": "fake", "input": HI,
        "tools": [{"type": "function", "strict": False, **tool} for tool in named],
    }  # fmt: skip


def for_messages() -> dict[str, Any]:
    tools = [
        {"name": "get", "input_schema": SCHEMA},
        {"name": "now", "input_schema": {"type": "object", "properties": {}}},
    ]
    return {"model": "fake", "messages": HI, "tools": tools, "max_tokens": 400}


def test_responses(server: Server) -> None:
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        whole = client.responses.create(**for_responses(), extra_body=saying(SAID))
        with client.responses.stream(**for_responses(), extra_body=saying(SAID)) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
    reasoning, message, get, now = items = whole.to_dict()["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert whole.output_text == "I look."
    assert [(item["name"], item["arguments"]) for item in (get, now)] == [
        ("get", '{"city":"Rome"}'), ("now", "{}"),
    ]  # fmt: skip
    assert message["role"] == "assistant"
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len("<think>Let me see.</think>")
    varying = {"id", "call_id", "parsed_arguments"}
    for one, other in zip(items, streamed.to_dict()["output"], strict=True):  # type: ignore[call-overload]
        left, right = ({k: v for k, v in item.items() if k not in varying} for item in (one, other))
        assert json.dumps(left).replace(', "parsed": null', "") == json.dumps(right).replace(
            ', "parsed": null', ""
        )
    assert kinds.count("response.output_item.done") == 4
    assert "response.function_call_arguments.delta" in kinds


def test_an_answer_to_a_call(server: Server) -> None:
    """By items, and by previous_response_id: the prompt is the one of chat."""
    first = server.post(RESPONSES, {**for_responses(), **saying(SAID)})[1]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"of {item['name']}"}
        for item in first["output"][2:]
    ]
    ask = {**for_responses(), "max_output_tokens": 5}
    chained = server.post(
        RESPONSES, {**ask, "input": results, "previous_response_id": first["id"]}
    )[1]
    listed = server.post(RESPONSES, {**ask, "input": [*HI, *first["output"], *results]})[1]
    calls = [
        {"id": item["call_id"], "type": "function",
         "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in first["output"][2:]
    ]  # fmt: skip
    assistant = {"role": "assistant", "content": "I look.", "reasoning_content": "Let me see.",
                 "tool_calls": calls}  # fmt: skip
    tools = [
        {"role": "tool", "tool_call_id": r["call_id"], "content": r["output"]} for r in results
    ]
    functions = [
        {"type": "function", "function": {"name": "get", "parameters": SCHEMA, "strict": False}},
        {"type": "function", "function": {"name": "now", "parameters": {}}},
    ]
    chat = server.post(
        "/v1/chat/completions",
        {"messages": [*HI, assistant, *tools], "tools": functions, "max_tokens": 5},
    )[1]
    expected = chat["usage"]["prompt_tokens"]
    assert chained["usage"]["input_tokens"] == listed["usage"]["input_tokens"] == expected
    blocks = [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "get", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "b", "name": "now", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "of get"},
        {
            "type": "tool_result",
            "tool_use_id": "b",
            "content": [{"type": "text", "text": "of now"}],
        },
    ]
    turns = [*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    counted = server.post(MESSAGES + "/count_tokens", {**for_messages(), "messages": turns})[1]
    tools_of_messages = [
        {"type": "function", "function": {"name": "get", "parameters": SCHEMA}},
        {"type": "function",
         "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]  # fmt: skip
    again = server.post(
        "/v1/chat/completions",
        {"messages": [*HI, assistant, *tools], "tools": tools_of_messages, "max_tokens": 5},
    )[1]
    assert counted["input_tokens"] == again["usage"]["prompt_tokens"]


def test_messages(server: Server) -> None:
    with Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        whole = client.messages.create(**for_messages(), extra_body=saying(SAID))
        with client.messages.stream(**for_messages(), extra_body=saying(SAID)) as stream:
            streamed = stream.get_final_message()
        thinking, text, get, now = whole.to_dict()["content"]
        assert (thinking["type"], thinking["thinking"]) == ("thinking", "Let me see.")
        assert text["text"] == "I look."
        assert [(c["name"], c["input"]) for c in (get, now)] == [
            ("get", {"city": "Rome"}),
            ("now", {}),
        ]
        assert whole.stop_reason == streamed.stop_reason == "tool_use"
        assert [block.type for block in streamed.content] == [block.type for block in whole.content]
        kept = [(b.to_dict().get("input"), b.to_dict().get("text")) for b in streamed.content]
        assert kept == [(b.to_dict().get("input"), b.to_dict().get("text")) for b in whole.content]
        assert whole.usage.to_dict()["output_tokens_details"] == {"thinking_tokens": 26}


def test_tool_choice_and_one_call_at_a_time(shared_server: Server) -> None:
    one = {"type": "any", "disable_parallel_tool_use": True}
    status, answer = shared_server.post(MESSAGES, {**for_messages(), "tool_choice": one})
    assert status == 200, answer
    assert len([b for b in answer["content"] if b["type"] == "tool_use"]) == 1
    named = {"type": "tool", "name": "now"}
    status, answer = shared_server.post(MESSAGES, {**for_messages(), "tool_choice": named})
    assert [b["name"] for b in answer["content"] if b["type"] == "tool_use"] == ["now"]
    named = {"type": "function", "name": "now"}
    status, answer = shared_server.post(RESPONSES, {**for_responses(), "tool_choice": named})
    assert [i["name"] for i in answer["output"] if i["type"] == "function_call"] == ["now"]


def test_cut_short(server: Server) -> None:
    """B061: how it ended, when the limit came inside of each kind."""
    for limit, kind in ((12, "reasoning"), (30, "message"), (80, "function_call")):
        status, answer = server.post(
            RESPONSES, {**for_responses(), **saying(SAID), "max_output_tokens": limit}
        )
        last = answer["output"][-1]
        assert (status, last["type"], last["status"]) == (200, kind, "incomplete")
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        status, answer = server.post(
            MESSAGES, {**for_messages(), **saying(SAID), "max_tokens": limit}
        )
        assert (status, answer["stop_reason"]) == (200, "max_tokens")


def test_thinking_can_be_asked_for_where_a_model_thinks(
    server: Server, shared_server: Server
) -> None:
    asked = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": HI, "max_tokens": 5, "thinking": asked}
    assert server.post(MESSAGES, body)[0] == 200
    for path in (MESSAGES, MESSAGES + "/count_tokens"):
        status, answer = shared_server.post(path, body)
        assert (status, answer["error"]["message"]) == (400, "thinking: this model does not think")
    adaptive = {**body, "thinking": {"type": "adaptive"}}
    assert shared_server.post(MESSAGES, adaptive)[0] == 200


def test_log_probabilities_are_of_plain_text(server: Server) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"]}
    status, answer = server.post(RESPONSES, body)
    assert (status, answer["error"]["param"]) == (400, "include")

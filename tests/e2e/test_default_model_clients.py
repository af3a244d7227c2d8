"""OpenAI's and Anthropic's clients against `headrace serve` with the default model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from tests.devices import WITHOUT_NATIVE
from tests.e2e.serve_process import ServeProcess

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}  # Anthropic's client has no name for it any more
WEATHER = "The weather in Paris for 3 days, please."


@pytest.fixture
def openai_client(default_server: ServeProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=default_server.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
def anthropic_client(default_server: ServeProcess) -> Iterator[Anthropic]:
    with Anthropic(base_url=default_server.url, api_key="any", max_retries=0) as made:
        yield made


def test_every_protocol_says_the_same(
    default_server: ServeProcess, openai_client: Any, anthropic_client: Any
) -> None:
    """Greedy, whole and streamed, sync and async: one engine call behind all."""
    small: dict[str, Any] = {"model": MODEL, "temperature": 0}
    chat = openai_client.chat.completions.create(messages=ASK, max_tokens=16, **small)
    text = chat.choices[0].message.content or ""
    assert text
    answer = openai_client.responses.create(input=QUESTION, max_output_tokens=16, **small)
    assert answer.output_text == text
    message = anthropic_client.messages.create(
        messages=ASK, max_tokens=16, model=MODEL, extra_body=GREEDY
    )
    assert [block.to_dict()["text"] for block in message.content] == [text]
    with anthropic_client.messages.stream(
        messages=ASK, max_tokens=16, model=MODEL, extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == text
    events = openai_client.responses.create(
        input=QUESTION, max_output_tokens=16, stream=True, **small
    )
    pieces = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(pieces) == text
    assert len(pieces) > 1, "it came in pieces"
    counted = anthropic_client.messages.count_tokens(model=MODEL, messages=ASK)
    read = message.usage.cache_read_input_tokens or 0
    assert (
        counted.input_tokens
        == message.usage.input_tokens + read
        == answer.usage.input_tokens
        == chat.usage.prompt_tokens
    )

    async def at_once() -> list[str]:
        async with (
            AsyncOpenAI(base_url=default_server.url + "/v1", api_key="any") as one,
            AsyncAnthropic(base_url=default_server.url, api_key="any") as other,
        ):
            kept, said = await asyncio.gather(
                one.responses.create(input=QUESTION, max_output_tokens=16, **small),
                other.messages.create(messages=ASK, max_tokens=16, model=MODEL, extra_body=GREEDY),
            )
            return [kept.output_text, str(said.content[0].to_dict()["text"])]

    assert asyncio.run(at_once()) == [text, text]


def test_a_conversation(openai_client: Any) -> None:
    small: dict[str, Any] = {"model": MODEL, "temperature": 0}
    first = openai_client.responses.create(input="My name is Ada.", max_output_tokens=12, **small)
    second = openai_client.responses.create(
        input="What is my name?", previous_response_id=first.id, max_output_tokens=12, **small
    )
    turns = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    chat = openai_client.chat.completions.create(messages=turns, max_tokens=12, **small)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.usage.input_tokens_details.cached_tokens >= 32, "the prompt before, at least"


def test_tools_of_responses(openai_client: Any) -> None:
    """Forced through a grammar: a model of this size calls nothing by itself."""
    tools: list[Any] = [
        {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    ]
    asked: dict[str, Any] = {
        "model": MODEL, "input": WEATHER, "tools": tools, "max_output_tokens": 60,
        "tool_choice": {"type": "function", "name": "weather"}, "temperature": 0,
    }  # fmt: skip
    (call,) = openai_client.responses.create(**asked).output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    with openai_client.responses.stream(**asked) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert "".join(deltas) == streamed.arguments == call.arguments
    told = openai_client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": WEATHER},
            call.to_dict(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ],
        tools=tools,
        tool_choice="none",
        max_output_tokens=20,
        temperature=0,
    )
    assert told.output_text


def test_tools_of_messages(anthropic_client: Any) -> None:
    tools: list[Any] = [{"name": "weather", "input_schema": PARAMETERS}]
    asked: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": WEATHER}], "tools": tools,
        "max_tokens": 60, "tool_choice": {"type": "tool", "name": "weather"}, "extra_body": GREEDY,
    }  # fmt: skip
    message = anthropic_client.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    jsonschema.validate(call.input, PARAMETERS)
    with anthropic_client.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    told = anthropic_client.messages.create(
        model=MODEL,
        messages=[
            *asked["messages"],
            {"role": "assistant", "content": [call.to_dict()]},
            {"role": "user", "content": [result]},
        ],
        tools=tools,
        tool_choice={"type": "none"},
        max_tokens=20,
        extra_body=GREEDY,
    )
    assert told.content[0].type == "text"


@pytest.mark.skipif(bool(WITHOUT_NATIVE), reason=WITHOUT_NATIVE)
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/self/maps")
def test_nothing_imports_torch(default_server: ServeProcess, openai_client: OpenAI) -> None:
    """No process of the server, whatever it was asked: its start and its memory are without it."""
    draws: list[dict[str, Any]] = [
        {"temperature": 1.2, "top_p": 0.9, "seed": 1, "frequency_penalty": 0.5, "n": 2},
        {"temperature": 0.8, "logprobs": True, "top_logprobs": 3, "logit_bias": {"17": -5}},
        {"extra_body": {"min_p": 0.05, "typical_p": 0.9, "top_k": 30, "dry_multiplier": 0.5}},
        {"response_format": {"type": "json_object"}},
    ]
    for more in draws:
        chat = openai_client.chat.completions.create(
            **{"model": MODEL, "messages": ASK, "max_tokens": 8, "seed": 1, **more}
        )
        assert all(choice.message.content for choice in chat.choices)
    told = openai_client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=2, extra_body={"prompt_logprobs": 2}
    )
    assert (told.choices[0].model_extra or {})["prompt_logprobs"]
    assert openai_client.embeddings.create(model=MODEL, input=QUESTION).data[0].embedding
    for name, pid in default_server.children.items():
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), name

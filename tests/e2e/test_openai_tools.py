"""Tools through the official client against the real default model: 135M parameters, whose calls
are valid because a grammar makes them. And the example of docs/tools.md, as it stands there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.e2e.serve_process import ServeProcess

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CLOCK = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "local"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
ASK: Any = [{"role": "user", "content": "What is the weather in Rome, and what time is it?"}]
BASE: Any = {"messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 120}


@pytest.fixture(scope="module")
def server(default_server: ServeProcess) -> ServeProcess:
    return default_server


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def checked(calls: Any) -> list[tuple[str, Any]]:
    """Names and arguments, which validate."""
    found = []
    for call in calls:
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        found.append((call.function.name, arguments))
    return found


def streamed(client: OpenAI, model: str, **fields: Any) -> tuple[list[tuple[str, str]], str]:
    """(names and arguments of the calls of a stream, the finish reason)"""
    calls: list[list[str]] = []
    finish = ""
    for chunk in client.chat.completions.create(model=model, stream=True, **fields):
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.function is not None
            if piece.id is not None:
                calls.append([piece.function.name or "", ""])
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    return [(name, text) for name, text in calls], finish


@pytest.mark.parametrize("name", [*SCHEMAS, "required"])
def test_forced_calls_are_valid_streamed_or_not(client: OpenAI, model: str, name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    fields = BASE | {
        "tool_choice": "required" if name == "required" else named,
        "parallel_tool_calls": False,
    }
    answer = client.chat.completions.create(model=model, **fields)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = checked(choice.message.tool_calls)
    assert name in (call[0], "required")
    calls, finish = streamed(client, model, **fields)
    assert finish == "tool_calls"
    assert [(name, json.loads(text)) for name, text in calls] == [call]


def test_parallel_calls_and_the_next_turn(client: OpenAI, model: str) -> None:
    """The format leaves two calls and nothing else; then their results go back."""
    pattern = "\n".join(
        rf'<tool_call>\n\{{"name": "{name}", "arguments": {arguments}\}}\n</tool_call>'
        for name, arguments in (
            ("get_weather", r'\{"city": "[A-Z][a-z]{1,8}", "unit": "(celsius|fahrenheit)"\}'),
            ("get_time", r'\{"zone": "(UTC|local)"\}'),
        )
    )
    body = {"structured_outputs": {"regex": pattern}}
    answer = client.chat.completions.create(model=model, **BASE, extra_body=body)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [name for name, _ in checked(message.tool_calls)] == ["get_weather", "get_time"]
    assert message.tool_calls is not None
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    history: Any = [*ASK, message.model_dump(), *results]
    text = client.chat.completions.create(
        model=model, messages=history, tools=TOOLS, tool_choice="none", max_tokens=8, temperature=0
    )
    assert text.choices[0].message.content
    assert not text.choices[0].message.tool_calls


def test_an_automatic_answer_is_what_the_model_likes(client: OpenAI, model: str) -> None:
    for strict in (True, False):
        tools: Any = [
            {"type": "function", "function": {**tool["function"], "strict": strict}}
            for tool in TOOLS
        ]
        fields = {**BASE, "tools": tools, "max_tokens": 24}
        answer = client.chat.completions.create(model=model, **fields)
        (choice,) = answer.choices
        assert choice.message.content or choice.message.tool_calls
        if strict and choice.finish_reason == "tool_calls":
            checked(choice.message.tool_calls)
        calls, finish = streamed(client, model, **fields)
        assert finish == choice.finish_reason
        functions = [call.function for call in choice.message.tool_calls or []]
        assert calls == [(one.name, one.arguments) for one in functions]


def test_a_template_of_the_request_needs_a_setting(client: OpenAI, model: str) -> None:
    with pytest.raises(BadRequestError, match="--trust-request-chat-template") as caught:
        client.chat.completions.create(
            model=model, messages=ASK, extra_body={"chat_template": "{{ messages }}"}
        )
    assert caught.value.param == "chat_template"


async def test_async(server: ServeProcess, model: str) -> None:
    async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=model, **BASE, tool_choice="required", parallel_tool_calls=False
        )
        (whole,) = checked(answer.choices[0].message.tool_calls)
        async with client.chat.completions.stream(
            model=model, **BASE, tool_choice="required", parallel_tool_calls=False
        ) as stream:
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert calls is not None
        assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [whole]


def test_the_page(server: ServeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "http://localhost:8000" in example
    exec(example.replace("http://localhost:8000", server.url), {})
    assert "get_weather {" in capsys.readouterr().out

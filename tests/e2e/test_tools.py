"""Tools and reasoning over HTTP, on the fake model, which writes what a regular expression says."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.e2e.serving import Server, events

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
FIRST = '<tool_call>\n{"name": "get", "arguments": {"city":"Ro\\u006de","days":1}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": { }}\n</tool_call>'


@pytest.fixture
def server(thinking_server: Server) -> Server:
    return thinking_server


def body(text: str | None = None, **fields: Any) -> dict[str, Any]:
    """text: what the model says."""
    asked = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 400, **fields}
    if text is not None:
        asked["structured_outputs"] = {"regex": re.escape(text).replace("\\\n", "\\n")}
    return asked


def folded(raw: bytes, n: int = 1) -> list[dict[str, Any]]:
    """A stream as the messages of its choices, with `finish_reason`."""
    out: list[dict[str, Any]] = [
        {"content": "", "reasoning": "", "tool_calls": [], "entries": []} for _ in range(n)
    ]
    for event in events(raw):
        for choice in event["choices"] if event != "[DONE]" else []:
            one, delta = out[choice["index"]], choice["delta"]
            assert "finish_reason" not in one, "nothing comes behind a finish chunk"
            assert delta.get("reasoning") == delta.get("reasoning_content")
            one["content"] += delta.get("content") or ""
            one["reasoning"] += delta.get("reasoning") or ""
            one["entries"] += (choice["logprobs"] or {}).get("content") or []
            for piece in delta.get("tool_calls", []):
                if "id" in piece:
                    assert piece["index"] == len(one["tool_calls"])
                    assert piece["type"] == "function"
                    one["tool_calls"].append(piece)
                else:
                    assert set(piece) == {"index", "function"}
                    call = one["tool_calls"][piece["index"]]
                    call["function"]["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"]:
                one["finish_reason"] = choice["finish_reason"]
    return out


def both(server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    """The choice of a whole answer; its stream says the same, call ids aside."""
    status, answer = server.post(CHAT, asked)
    assert status == 200, answer
    choice = answer["choices"][0]
    message = choice["message"]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    raw = server.request("POST", CHAT, {**asked, **streamed})[2]
    (one,) = folded(raw)
    assert one["content"] == (message["content"] or "")
    assert one["reasoning"] == message.get("reasoning", "") == message.get("reasoning_content", "")
    assert one["finish_reason"] == choice["finish_reason"]
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert [call["function"] for call in one["tool_calls"]] == functions
    usage = next(event["usage"] for event in events(raw) if event != "[DONE]" and event["usage"])
    assert usage["completion_tokens_details"] == answer["usage"]["completion_tokens_details"]
    return {**choice, "usage": answer["usage"], "entries": one["entries"]}


def test_two_calls_and_text(server: Server) -> None:
    """B059, B060."""
    found = both(server, body(f"Well.\n{FIRST}\n{SECOND}", tools=TOOLS))
    message = found["message"]
    assert message["content"] == "Well."
    assert found["finish_reason"] == "tool_calls"
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get", "now"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        {"city": "Rome", "days": 1},
        {},
    ]
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize(
    ("text", "fields", "finish", "calls"),
    [
        ("Text.", {}, "stop", 0),
        ("Text.", {"stop": ["xt"]}, "stop", 0),
        ("Text.", {"max_tokens": 3}, "length", 0),
        ("Text.", {"stop_token_ids": [ord(".")], "tools": None}, "stop", 0),
        (SECOND, {}, "tool_calls", 1),
        (SECOND, {"tool_choice": "none"}, "stop", 0),
        (SECOND, {"max_tokens": 20}, "length", 0),
        (FIRST, {"max_tokens": 60}, "length", 1),
        (FIRST, {"stop": ["days"]}, "stop", 1),
        (SECOND + "\nDone.", {"stop": ["one."]}, "tool_calls", 1),
        (f"<think>hm</think>{SECOND}", {}, "tool_calls", 1),
        (f"<think>{SECOND}</think>So.", {}, "stop", 0),
    ],
)
def test_the_finish_reason_is_exact(
    server: Server, text: str, fields: dict[str, Any], finish: str, calls: int
) -> None:
    """B061."""
    if "stop_token_ids" in fields:  # a grammar that needs the stop token would be refused
        asked = body(**{**fields, "logit_bias": {str(ord(".")): 100}})
    else:
        asked = body(text, **{"tools": TOOLS, **fields})
    found = both(server, asked)
    assert found["finish_reason"] == finish
    assert len(found["message"].get("tool_calls", [])) == calls
    if finish == "length":
        assert found["usage"]["completion_tokens"] == fields["max_tokens"]


def test_reasoning_and_a_stop_string_that_almost_cuts_its_mark(server: Server) -> None:
    """B007."""
    found = both(server, body("<think>abc</think>done", stop=["b,c"]))
    assert (found["message"]["reasoning"], found["message"]["content"]) == ("abc", "done")
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 18}
    cut = both(server, body("<think>abc</think>done", stop=["</th"]))
    assert (cut["message"]["reasoning"], cut["message"]["content"]) == ("abc", None)
    short = both(server, body("<think>abc</think>done", max_tokens=9))
    assert (short["message"]["reasoning"], short["finish_reason"]) == ("ab", "length")
    assert short["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}


def test_n_and_logprobs(server: Server) -> None:
    text = f"<think>abc</think>done {SECOND}"
    asked = body(text, tools=TOOLS, n=3, seed=5)
    answer = server.post(CHAT, asked)[1]
    whole = [choice["message"] for choice in answer["choices"]]
    streamed = folded(server.request("POST", CHAT, {**asked, "stream": True})[2], 3)
    for one, message in zip(streamed, whole, strict=True):
        assert (one["reasoning"], one["content"]) == ("abc", "done")
        assert message["reasoning"] == "abc"
        assert [call["function"]["name"] for call in one["tool_calls"]] == ["now"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 * 18}
    told = both(server, body(text, tools=TOOLS, logprobs=True))
    entries = told["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert [entry["bytes"] for entry in told["entries"]] == [entry["bytes"] for entry in entries]


def test_forced_calls(server: Server) -> None:
    forced = (
        ("required", 16),
        ({"type": "function", "function": {"name": "get"}}, 1),
    )
    done = 0
    for seed in range(6):
        for choice, most in forced:
            asked = body(tools=TOOLS, tool_choice=choice, seed=seed)
            # Without an h it does not begin to think: it would find no end of it.
            found = server.post(CHAT, {**asked, "logit_bias": {str(ord("h")): -100}})[1]
            assert "choices" in found, found
            one = found["choices"][0]
            if one["finish_reason"] == "length":
                continue
            done += 1
            assert one["finish_reason"] == "tool_calls"
            assert one["message"]["content"] is None
            calls = one["message"]["tool_calls"]
            assert 1 <= len(calls) <= most
            for call in calls:
                schema = {"get": SCHEMA, "now": {"maxProperties": 0}}[call["function"]["name"]]
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    assert done >= 4


def test_a_schema_that_does_not_compile(server: Server) -> None:
    """B068. Of a tool that is not strict, the names stay and the values are free."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "(?<=x)"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"name": "f", "parameters": schema}
    asked = body(tool_choice="required", logit_bias={str(ord("h")): -100}, max_tokens=60, seed=1)
    loose = server.post(CHAT, {**asked, "tools": [{"type": "function", "function": tool}]})
    assert loose[0] == 200, loose
    assert loose[1]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    strict = [{"type": "function", "function": {**tool, "strict": True}}]
    status, answer = server.post(CHAT, {**asked, "tools": strict})
    assert (status, answer["error"]["param"]) == (400, "tools[0].function.parameters")
    assert "look-around" in answer["error"]["message"]


def test_an_automatic_answer_is_calls_or_the_format(server: Server) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    for seed in range(3):
        asked = body(tools=TOOLS, response_format=wanted, seed=seed, max_tokens=300)
        found = server.post(CHAT, {**asked, "logit_bias": {str(ord("<")): -100}})[1]
        assert found["choices"][0]["message"]["content"] == '"yes"'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
         "structured_outputs"),
        ({"tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {
            "name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}}]},
         "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_refusals(server: Server, fields: dict[str, Any], param: str) -> None:
    status, answer = server.post(CHAT, body(**fields))
    assert status == 400, answer
    assert answer["error"]["param"].startswith(param)
    assert server.post("/v1/completions", {"prompt": "x", "tools": TOOLS})[0] == 400


def test_a_turn_of_calls_is_rendered(server: Server) -> None:
    """B054, B055: what was called and what came back are in the prompt, whatever `content` is."""
    call = {"id": "c", "type": "function", "function": {"name": "get_code", "arguments": "{}"}}
    shown = []
    for turn in ({"content": None}, {}):
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", **turn, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "42.7"}]},
        ]
        status, answer = server.post("/tokenize", {"messages": messages, "tools": TOOLS})
        assert status == 200, answer
        shown.append(bytes(token for token in answer["tokens"] if token < 256).decode())
        assert server.post(CHAT, {"messages": messages, "max_tokens": 2})[0] == 200
    assert shown[0] == shown[1]
    for text in ("get_code", "42.7", '"name": "get"', "assistant"):
        assert text in shown[0]
    empty = [
        {"role": r, "content": c} for r, c in (("user", "A"), ("assistant", ""), ("user", "B"))
    ]
    assert server.post(CHAT, {"messages": empty, "max_tokens": 2})[0] == 200


def test_a_template_of_the_request(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "A"}], "chat_template_kwargs": {"x": "B"}}
    text = "{% for m in messages %}{{ m.content }}{{ x }}{% endfor %}"
    answer = server.post("/tokenize", {**asked, "chat_template": text})[1]
    assert answer["tokens"] == list(b"AB")
    status, answer = server.post(CHAT, {**asked, "chat_template": text, "max_tokens": 1})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)
    # A template that opens the reasoning: the answer begins inside.
    inside = body("hm</think>So.", chat_template="<think>\n")
    message = both(server, inside)["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "So.")
    # So does one that the client has begun, in a text or in parts.
    for begun in (
        "<think>Hm, ",
        [{"type": "text", "text": "<think>"}, {"type": "text", "text": "Hm"}],
    ):
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": begun}]
        shown = {"messages": turns, "chat_template": "{{ messages[1].content }}"}
        message = both(server, {**inside, **shown, "continue_final_message": True})["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "So.")
    status, answer = server.post(CHAT, {**asked, "chat_template": "{% for %}"})
    assert (status, answer["error"]["param"]) == (400, "chat_template")


def test_harmless_fields_of_the_reference(server: Server) -> None:
    """Combinations: none of them ever causes a 400."""
    fields: dict[str, Any] = {
        "user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "store": True,
        "parallel_tool_calls": True, "response_format": {"type": "text"}, "tools": [],
        "tool_choice": "auto", "safety_identifier": "s", "prompt_cache_key": "k", "logprobs": False,
        "modalities": ["text"], "stop": None, "logit_bias": {}, "n": 1, "seed": None,
    }  # fmt: skip
    status, headers, raw = server.request("POST", CHAT, body(**{**fields, "max_tokens": 2}))
    assert status == 200, raw
    assert "x-headrace-ignored-fields" not in headers

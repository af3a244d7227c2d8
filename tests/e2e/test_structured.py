"""Structured output over HTTP, on the fake model: its draws wander through all that is allowed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.e2e.serving import Server, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dög"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
HOSTILE = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(8000)}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(fake_step_ms=0.2) as running:
        yield running
        running.wait_idle()


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "A pet."}], "max_tokens": 200, **fields}


def contents(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def stopped(answer: dict[str, Any]) -> list[str]:
    return [c["message"]["content"] for c in answer["choices"] if c["finish_reason"] == "stop"]


def test_json_schema_in_chat(server: Server) -> None:
    found = []
    for seed in range(6):
        status, answer = server.post(CHAT, body(response_format=FORMAT, seed=seed, n=2))
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] >= sum(map(len, contents(answer)))
        found += stopped(answer)
    assert len(found) >= 8
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_stream_says_the_same(server: Server) -> None:
    asked = body(response_format=FORMAT, seed=7)
    (text,) = contents(server.post(CHAT, asked)[1])
    for stop in (None, ["zzzz"]):
        raw = server.request("POST", CHAT, {**asked, "stream": True, "stop": stop})[2]
        chunks = [event for event in events(raw) if event != "[DONE]"]
        streamed = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        assert streamed == text


def test_every_constraint(server: Server) -> None:
    for fields, pattern in (
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "nö 😀", 'a"b\n']}}, 'yes|nö 😀|a"b\n'),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
        (
            {"structured_outputs": {"json": json.dumps({"const": [1, "é"]})}},
            r'\[\s*1\s*,\s*"é"\s*\]',
        ),
        ({"guided_json": {"const": None}}, "null"),
    ):
        for seed in range(3):
            status, answer = server.post(
                TEXT, {"prompt": "x", "max_tokens": 60, "seed": seed, **fields}
            )
            assert status == 200, answer
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop"
            assert re.fullmatch(pattern, choice["text"]), fields


def test_json_object(server: Server) -> None:
    for seed in range(4):
        asked = body(response_format={"type": "json_object"}, seed=seed, max_tokens=60)
        for text in stopped(server.post(CHAT, asked)[1]):
            assert isinstance(json.loads(text), dict)
        assert contents(server.post(CHAT, asked)[1])[0].startswith("{")


def test_a_complete_grammar_ends_whatever_else_is_asked(server: Server) -> None:
    more = {
        "ignore_eos": True,
        "min_tokens": 50,
        "frequency_penalty": 2,
        "logit_bias": {"97": -100},
    }
    status, answer = server.post(
        TEXT, {"prompt": "x", "structured_outputs": {"regex": "ab"}, "max_tokens": 60, **more}
    )
    assert status == 200, answer
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2


def test_nothing_to_say_is_an_answer_behind_an_echo(server: Server) -> None:
    """The end is known before a token is drawn; the prompt is reported on all the same."""
    asked = {"prompt": "hello", "structured_outputs": {"regex": "a*"}, "stop_token_ids": [97]}
    for n in (1, 2):
        echoed = {**asked, "n": n, "echo": True, "logprobs": 1}
        status, answer = server.post(TEXT, echoed)
        assert status == 200, answer
        for choice in answer["choices"]:
            assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")
            assert choice["logprobs"]["tokens"] == list("hello")
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
        assert answer["usage"]["completion_tokens"] == 0
        raw = server.request("POST", TEXT, {**echoed, "stream": True})[2]
        *chunks, done = events(raw)
        assert done == "[DONE]"
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == n - 1]
        assert [one["text"] for one in own] == ["hello", ""]
        assert own[0]["logprobs"] == answer["choices"][0]["logprobs"]
        assert own[1]["finish_reason"] == "stop"
    status, answer = server.post(TEXT, {**asked, "prompt_logprobs": 1})
    assert status == 200, answer
    assert len(answer["choices"][0]["prompt_logprobs"]) == 5


def test_choices_that_end_one_after_another_under_rules(server: Server) -> None:
    """A choice that has ended has a draw in flight, for which no token may be left."""
    for seed in range(8):
        status, answer = server.post(
            TEXT,
            {
                "prompt": "hello",
                "n": 4,
                "max_tokens": 40,
                "seed": seed,
                "allowed_token_ids": list(range(97, 123)),
                "structured_outputs": {"regex": "[a-f]{1,3}x|[g-z]{30}"},
            },
        )
        assert status == 200, answer
        texts = [choice["text"] for choice in answer["choices"]]
        assert all(re.fullmatch("[a-f]{1,3}x|[g-z]{30}", text) for text in texts), texts


def test_a_choice_that_a_stop_string_ended_costs_the_others_nothing(server: Server) -> None:
    """Behind its stop string no token is left, which the engine may see before it hears of that."""
    for seed in range(8):
        asked = {
            "prompt": "hello", "n": 4, "max_tokens": 60, "seed": seed, "stop": " ",
            "structured_outputs": {"regex": "b a|c{40}"}, "stop_token_ids": [97],
        }  # fmt: skip
        status, answer = server.post(TEXT, asked)
        assert status == 200, answer
        assert {choice["text"] for choice in answer["choices"]} <= {"b", "c" * 40}
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
        raw = server.request("POST", TEXT, {**asked, "stream": True})[2]
        assert events(raw)[-1] == "[DONE]"


def test_no_token_left_is_that_requests_error(server: Server) -> None:
    status, answer = server.post(
        TEXT, {"prompt": "x", "structured_outputs": {"regex": "aa"}, "banned_token_ids": [97]}
    )
    assert status == 400  # the caller's fields exclude each other: no fault of the server
    message = answer["error"]["message"]
    assert "no token is allowed" in message
    assert "structured output" in message
    assert "banned_token_ids" in message
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x y"}}}, "name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}},
                }
            },
            "additionalProperties",
        ),
        ({"structured_outputs": {"json": {"type": "nope"}}}, "type"),
        ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "$ref"),
        ({"structured_outputs": {"json": {"not": {}}}}, "not"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exclude"),
        ({"structured_outputs": {"regex": "(?<=x)*"}}, "look-"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        ({"structured_outputs": {"choice": [""]}}, "choice"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "exclude"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Server, fields: dict[str, Any], named: str
) -> None:
    status, answer = server.post(CHAT, body(**fields))
    assert status == 400, answer
    assert named in answer["error"]["message"]
    assert answer["error"]["param"].split(".")[0] in fields


def test_b069_a_hostile_schema_is_cut_off_while_others_go_on(server: Server) -> None:
    def other(seed: int) -> dict[str, Any]:
        return body(seed=seed, max_tokens=120, ignore_eos=True)

    alone = [contents(server.post(CHAT, other(seed))[1]) for seed in range(4)]
    refused: list[tuple[int, Any]] = []
    hostile = threading.Thread(
        target=lambda: refused.append(server.post(CHAT, body(structured_outputs={"json": HOSTILE})))
    )
    hostile.start()
    served = 0  # while it was being checked
    while hostile.is_alive():
        assert contents(server.post(CHAT, other(served % 4))[1]) == alone[served % 4]
        served += hostile.is_alive()
    hostile.join()
    ((status, answer),) = refused
    assert status == 400
    assert "too complex" in answer["error"]["message"]
    assert served, "others were served while it was being checked"
    assert server.post(CHAT, body(structured_outputs={"json": {"const": 1}}))[0] == 200


def test_b069_a_thousand_grammars_do_not_pile_up(server: Server) -> None:
    for i in range(200):
        fields = {"structured_outputs": {"choice": [f"answer {i}"]}, "max_tokens": 20}
        status, answer = server.post(TEXT, {"prompt": "x", **fields})
        assert status == 200
        assert answer["choices"][0]["text"] == f"answer {i}"

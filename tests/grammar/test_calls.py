"""Forced calls: whatever a grammar lets through is read back as calls whose arguments validate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

import jsonschema
import msgspec
import pytest

from headrace.errors import InvalidRequest
from headrace.grammar.asked import json_grammar
from headrace.grammar.calls import Offer, Way, after_thinking, forced, offered
from headrace.grammar.checker import BYTES, byte_tokenizer, verdict
from headrace.grammar.compile import compiled
from headrace.messages import Grammar
from headrace.text.answer_parser import AnswerParser
from headrace.text.calls.forms import FORMS
from headrace.text.parts import Said, said
from headrace.text.thinking import MARKS, Thinking
from tests.grammar.walk import matcher, walk

GET: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"enum": ["C", "F", None]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
}
FREE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "boolean"}},
    "additionalProperties": False,
}
NOW: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get": GET, "free": FREE, "now": NOW}
OFFERS = [Offer(name, schema, False, name) for name, schema in SCHEMAS.items()]
NAMES = {"get": ["city", "days", "unit"], "free": ["a", "b", "c"], "now": []}
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>", "<|tool_call_end|>", "</think>")
WAYS = [Way(form) for form in FORMS] + [Way("pythonic", "<|python_start|>", "<|python_end|>")]
EXAMPLES = {
    "hermes": '<tool_call>\n{"name": "get", "arguments": {"city": "R"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "get", "parameters": {"city": "R"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "get", "arguments": {"city": "R"}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral-args": '[TOOL_CALLS]get[ARGS]{"city": "R"}[TOOL_CALLS]now[ARGS]{}',
    "pythonic": '[get(city="R"), now()]',
}


def read(form: str, text: str, *, think: bool = False) -> tuple[Said, bool]:
    thinking = Thinking(MARKS["think"]) if think else None
    parser = AnswerParser(thinking, FORMS[form](NAMES, forced=True))
    return said(parser.feed(text) + parser.flush()), parser.called


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole text matches; special tokens are tokens."""
    inner = compiled(byte_tokenizer(SPECIAL), grammar)
    while text:
        name = next((at for at, name in enumerate(SPECIAL) if text.startswith(name)), None)
        step = [BYTES + 1 + name] if name is not None else list(text[0].encode())
        text = text[len(SPECIAL[name]) if name is not None else 1 :]
        if not all(inner.consume_token(token) for token in step):
            return False
    return bool(inner.is_accepting())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.form + way.opens)
@pytest.mark.parametrize("most", [1, 3])
def test_what_is_forced_is_calls(way: Way, most: int) -> None:
    start = matcher(forced(way, OFFERS, most))
    outputs = [walk(start, Random(f"{way.form}/{seed}"), eager=20) for seed in range(5)]
    found = [output.decode() for output in outputs if output is not None]
    assert len(found) > 2
    for text in found:
        one, called = read(way.form, text)
        assert called
        assert one.text == one.reasoning == ""
        assert 1 <= len(one.calls) <= most
        for call in one.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("way", [Way(form) for form in FORMS], ids=lambda way: way.form)
def test_marks_that_are_tokens_reasoning_and_text(way: Way) -> None:
    calls = EXAMPLES[way.form]
    special = msgspec.structs.replace(way, special=SPECIAL)
    for plain in (way, special) if "[TOOL" not in calls else (special,):
        thinks = msgspec.structs.replace(plain, thinks="<think>", thought="</think>")
        inside = msgspec.structs.replace(thinks, inside=True)
        json_text = json_grammar({"type": "object", "required": ["k"]}, "x")
        for grammar in (forced(plain, OFFERS, 4), offered(plain, OFFERS, 4, None)):
            assert verdict(byte_tokenizer(SPECIAL), grammar) == ""
            assert accepts(grammar, calls)
            assert not accepts(grammar, calls.replace("city", "town"))
        assert not accepts(forced(plain, OFFERS, 1), calls)
        assert not accepts(forced(plain, OFFERS, 4), "text")
        assert not accepts(offered(plain, OFFERS, 1, None), calls)
        assert accepts(offered(plain, OFFERS, 1, None), 'Text with {"name": 1} and [x].')
        assert accepts(offered(plain, OFFERS, 1, None), "")
        if plain is special:  # its end mark of reasoning is a token
            assert accepts(forced(thinks, OFFERS, 4), f"<think>a\n{{b</think>\n\n{calls}")
            assert accepts(forced(thinks, OFFERS, 4), calls)
            assert accepts(forced(inside, OFFERS, 4), f"a b</think>{calls}")
            assert not accepts(forced(inside, OFFERS, 4), calls)
            either = offered(inside, OFFERS, 4, json_text)
            assert accepts(either, f"hm</think>\n\n{calls}")
            assert accepts(either, 'hm</think>{"k": [1]}')
            assert not accepts(either, 'hm</think>{"l": [1]}')
            behind = after_thinking(thinks, json_text)
            assert accepts(behind, '<think>{</think>{"k": 1}')
            assert accepts(behind, '{"k": 1}')
            assert not accepts(behind, "<think>{</think>no")


def test_reasoning_whose_marks_are_text() -> None:
    way = Way("hermes", thinks="<think>", thought="</think>")
    text = f"<think>Why </thin not</think>\n{EXAMPLES['hermes']}"
    at = matcher(forced(way, OFFERS, 4))
    for token in text.encode():
        at.advance(token)
    assert at.accepts
    one, called = read("hermes", text, think=True)
    assert called
    assert one.reasoning == "Why </thin not"


def test_a_schema_that_cannot_be_enforced() -> None:
    hard: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"not": {}}},
        "required": ["a"],
        "additionalProperties": False,
    }
    loose = forced(Way("hermes"), [Offer("f", hard, False, "tools[0]")], 1)
    assert accepts(loose, '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>')
    assert not accepts(loose, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    listed = forced(Way("pythonic"), [Offer("f", hard, False, "tools[0]")], 1)
    assert accepts(listed, "[f(a=[1])]")
    with pytest.raises(InvalidRequest, match=r"tools\[0\].properties.a: not") as caught:
        forced(Way("hermes"), [Offer("f", hard, True, "tools[0]")], 1)
    assert caught.value.param == "tools[0]"


@pytest.mark.parametrize("odd", [5, True, "a", [["a"]], {"a": 1}])
def test_a_list_of_names_that_is_none(odd: Any) -> None:
    """`required`, where nobody asked for a strict schema."""
    schema = {"type": "object", "properties": {"a": {}}, "required": odd}
    listed = forced(Way("pythonic"), [Offer("f", schema, False, "tools[0]")], 1)
    assert accepts(listed, "[f()]")
    assert accepts(listed, "[f(a=1)]")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"no-name": {}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}},
        {"type": "object", "anyOf": [{"required": ["a"]}]},
    ],
)
def test_what_the_pythonic_form_cannot_say(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="pythonic"):
        forced(Way("pythonic"), [Offer("f", schema, False, "tools[0]")], 1)

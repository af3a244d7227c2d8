"""Parsers of tool calls and reasoning: every sample cut at every character, and random texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.answer_parser import AnswerParser
from headrace.text.calls.calls import Calls
from headrace.text.calls.forms import FORMS, form_of, list_marks
from headrace.text.calls.python_value import json_of
from headrace.text.parts import Part, joined, said
from headrace.text.thinking import MARKS, Thinking, begun, marks_of

TOOLS = {"get": ["city", "days"], "now": []}


def parser(form: str, *, think: bool = False, inside: bool = False) -> AnswerParser:
    thinking = Thinking(MARKS["think"], inside=inside) if think or inside else None
    return AnswerParser(thinking, FORMS[form](TOOLS) if form else None)


def run(machine: AnswerParser | Calls, pieces: Iterable[str]) -> tuple[Any, ...]:
    """(reasoning, text, calls, called, kinds of the joined parts); ids are random."""
    parts: list[Part] = [part for piece in pieces for part in machine.feed(piece)]
    parts += machine.flush()
    one = said(parts)
    calls = [(call.name, call.arguments) for call in one.calls]
    kinds = [type(part).__name__ for part in joined(parts)]
    return one.reasoning, one.text, calls, machine.called, kinds


GET = ("get", '{"city": "Rome", "days": 3}')
NOW = ("now", "{}")
# (form, the model's text, text, calls, called)
SAMPLES: list[tuple[str, str, str, list[tuple[str, str]], bool]] = [
    ("hermes", "Just text with <b>tags</b>. ", "Just text with <b>tags</b>. ", [], False),
    (
        "hermes",
        'Well.\n\n<tool_call>\n{"name": "get", "arguments": {"city": "Rome", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "Well.",
        [GET, NOW],
        True,
    ),
    ("hermes", '<tool_call>{"arguments":{"a":[1]},"name":"x"}', "", [("x", '{"a":[1]}')], True),
    ("hermes", '<tool_call>{"name":"x"}</tool_call> Done.', "Done.", [("x", "{}")], True),
    ("hermes", 'a <tool_call>{"name":"x"}</tool_call>\nb', "a\nb", [("x", "{}")], True),
    (
        "hermes",
        '<tool_call>{"name": "x", "arguments": {"s": "</tool_call>{\\"\\\\", "t": [[{}]]}}'
        "</tool_call>",
        "",
        [("x", '{"s": "</tool_call>{\\"\\\\", "t": [[{}]]}')],
        True,
    ),
    ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>', "",
     [("x", '{"a": "é"}')], True),
    ("hermes", '<tool_call>{"name": "x", "arguments": null}</tool_call>', "", [("x", "{}")], True),
    ("hermes", '<tool_call>{"id": [1, {"name": 2}], "name": "x"}', "", [("x", "{}")], True),
    ("hermes", "The tag <tool_call> opens", "The tag <tool_call> opens", [], False),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', [],
     False),
    ("hermes", '<tool_call><tool_call>{"name":"x"}', "<tool_call>", [("x", "{}")], True),
    ("hermes", '<tool_call>{"name":"x","arguments":{"a": <b}}</tool_call> hi', "hi",
     [("x", '{"a": ')], False),
    ("hermes", '<tool_call>{"name":"x","arguments":{"a": "b', "", [("x", '{"a": "b')], False),
    ("hermes", '<tool_call>{"name":"x","argu', '<tool_call>{"name":"x","argu', [], False),
    ("hermes", '<tool_call>{"name":"x\\ud800"}', '<tool_call>{"name":"x\\ud800"}', [], False),
    ("hermes", "a <tool", "a <tool", [], False),
    ("llama", '{"name": "get", "parameters": {"city": "Rome", "days": 3}}', "", [GET], True),
    (
        "llama",
        '{"name": "get", "parameters": {"city": "Rome", "days": 3}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [GET, NOW],
        True,
    ),
    ("llama", '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")], True),
    ("llama", 'So: <|python_tag|>{"type": "function", "name": "now"}', "So:", [NOW], True),
    ("llama", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', [],
     False),
    ("llama", '{"answer": "<|python_tag|> is a mark"}', '{"answer": "<|python_tag|> is a mark"}',
     [], False),
    ("llama", ' {"name": "now"}', ' {"name": "now"}', [], False),
    ("llama", 'x {"name": "now", "parameters": {}}', 'x {"name": "now", "parameters": {}}', [],
     False),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get", "arguments": {"city": "Rome", "days": 3}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [GET, NOW],
        True,
    ),
    ("mistral", 'Hm.[TOOL_CALLS]get[ARGS]{"city": "Rome", "days": 3}[TOOL_CALLS]now{}', "Hm.",
     [GET, NOW], True),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}", "", [NOW], True),
    ("mistral", "[TOOL_CALLS] it's a mark", "[TOOL_CALLS] it's a mark", [], False),
    ("mistral", "[TOOL_CALLS][]x", "[TOOL_CALLS][]x", [], False),
    ("mistral", "[TOOL_CALLS]" + "a" * 400 + "{}", "[TOOL_CALLS]" + "a" * 400 + "{}", [], False),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, ', "", [NOW], True),
    ("mistral", '[TOOL_CALLS]now{"a": ', "", [("now", '{"a": ')], False),
    ("pythonic", '[get(city="Rome", days=3), now()]', "", [GET, NOW], True),
    ("pythonic", '[get("Rome", 3)]', "", [GET], True),
    ("pythonic", "[get(city='Ro)\\'me, [x', days=(1, None))]", "",
     [("get", '{"city": "Ro)\'me, [x", "days": [1, null]}')], True),
    ("pythonic", '<|python_start|>[other(a={"k": [True, null]})]<|python_end|>', "",
     [("other", '{"a": {"k": [true, null]}}')], True),
    ("pythonic", "On it.<|tool_call_start|>[now( )]<|tool_call_end|>\nYes.", "On it.\nYes.", [NOW],
     True),
    ("pythonic", "[1, 2]", "[1, 2]", [], False),
    ("pythonic", "[link](a)", "[link](a)", [], False),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", [], False),
    ("pythonic", "[get(city=R", "", [("get", "")], False),
]  # fmt: skip


@pytest.mark.parametrize(("form", "sample", "text", "calls", "called"), SAMPLES)
def test_every_sample_cut_everywhere(
    form: str, sample: str, text: str, calls: list[tuple[str, str]], called: bool
) -> None:
    """B059: joined deltas are the whole answer; B060: one Call a call."""
    whole = run(parser(form), [sample])
    assert whole[1:4] == (text, calls, called)
    assert run(parser(form), sample) == whole
    for at in range(len(sample)):
        assert run(parser(form), [sample[:at], sample[at:]]) == whole
    if called:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    think = run(parser(form, think=True), f"<think>\nHm {sample}\n</think>\n\n{sample}")
    assert think[0] == f"Hm {sample}".rstrip()
    assert think[2:4] == whole[2:4]
    assert think[1] == text.lstrip()


@pytest.mark.parametrize(
    ("sample", "inside", "reasoning", "text"),
    [
        ("<think>abc</think>done", False, "abc", "done"),
        ("\n<think>\n\na\n b \n</think>\n\n done ", False, "a\n b", "done "),
        ("<think>\n\n</think>\n\ndone", False, "", "done"),
        ("abc</think>done", True, "abc", "done"),
        ("<think>abc</think>done", True, "abc", "done"),
        ("abc </thi", True, "abc </thi", ""),
        ("abc\n", True, "abc", ""),
        ("<think>abc", False, "abc", ""),
        ("<thin", False, "", "<thin"),
        ("  <b>", False, "", "  <b>"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<think>a</think><think>b</think>", False, "a", "<think>b</think>"),
        ("", True, "", ""),
    ],
)
def test_reasoning(sample: str, inside: bool, reasoning: str, text: str) -> None:
    whole = run(parser("", think=True, inside=inside), [sample])
    assert whole[:2] == (reasoning, text)
    assert run(parser("", think=True, inside=inside), sample) == whole
    for at in range(len(sample)):
        assert run(parser("", think=True, inside=inside), [sample[:at], sample[at:]]) == whole


MARKUP = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>",
    "</think>", '{"name": "get", ', '"arguments": {', '"parameters": {}', '"a": "b"', "}", "{", "[",
    "]", "get(", "now()", "city=", ")", ",", ";", '"', "\\", "'", " ", "\n", "x", "é", "1", "<",
    "<|tool_call_start|>", "<|tool_call_end|>", "null",
)  # fmt: skip


@given(
    st.sampled_from([*FORMS, ""]),
    st.lists(st.sampled_from(MARKUP), max_size=14),
    st.booleans(),
    st.data(),
)
def test_random_text_does_not_depend_on_how_it_is_cut(
    form: str, tokens: list[str], inside: bool, data: st.DataObject
) -> None:
    sample = "".join(tokens)
    whole = run(parser(form, think=True, inside=inside), [sample])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sample)), max_size=6)))
    pieces = [sample[a:b] for a, b in zip([0, *cuts], [*cuts, len(sample)], strict=True)]
    assert run(parser(form, think=True, inside=inside), pieces) == whole
    assert run(parser(form, think=True, inside=inside), tokens) == whole
    assert run(parser(form, think=True, inside=inside), sample) == whole


def test_what_a_grammar_was_cut_in_is_no_text() -> None:
    for text in ('<tool_call>\n{"name": "ge', "<tool", ""):
        assert run(FORMS["hermes"](TOOLS, forced=True), text) == ("", "", [], False, [])


def test_ids_are_unique_and_as_the_templates_take_them() -> None:
    for form, pattern in (("hermes", "call_"), ("mistral", "")):
        machine = FORMS[form](TOOLS)
        text = {"hermes": '<tool_call>{"name":"x"}</tool_call>', "mistral": "[TOOL_CALLS]now{}"}
        parts = machine.feed(text[form] * 3) + machine.flush()
        ids = [call.id for call in said(parts).calls]
        assert len(set(ids)) == 3
        assert all(one.startswith(pattern) for one in ids)
        assert form != "mistral" or all(len(one) == 9 and one.isalnum() for one in ids)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-2.5", -2.5), ("+3", 3), ("'a\"b'", 'a"b'), ("True", True), ("false", False),
        ("None", None), ("null", None), ("[1, (2,), {'a': {3}}]", [1, [2], {"a": [3]}]),
        ('"\\d"', "\\d"), ("foo", "foo"), ("1 + 1", "1 + 1"), ("b'x'", "b'x'"), ("1e999", "1e999"),
        ("'\\ud800'", "\ud800"), ("-True", "-True"), ("{**x}", "{**x}"), ("", ""),
        ("[" * 5000, "[" * 5000), ("[" * 150 + "]" * 150, ...),
    ],
)  # fmt: skip
def test_python_values(text: str, value: Any) -> None:
    found = json.loads(json_of(text))
    assert value is ... or found == value
    json_of(text).encode()


def test_forms_of_templates() -> None:
    assert form_of(None) == ""
    assert form_of("{{ messages }}") == ""
    assert form_of("... <tool_call>\n ...") == "hermes"
    assert form_of("<tool_call><function=f>") == ""  # another form, with the same tags
    assert form_of("<|python_tag|>") == "llama"
    assert form_of("[TOOL_CALLS]") == "mistral"
    assert form_of("[TOOL_CALLS]x[ARGS]") == "mistral-args"
    assert form_of("<|tool_call_start|>") == "pythonic"
    assert list_marks("a <|python_start|>") == ("<|python_start|>", "<|python_end|>")
    assert list_marks("") == ("", "")
    assert marks_of("x </think>") == "think"
    assert marks_of(None) == ""
    assert begun("<|im_start|>assistant\n<think>\n", MARKS["think"])
    assert not begun("<think>\n\n</think>\n\n", MARKS["think"])
    assert begun("q<think>So far", MARKS["think"], "<think>So far")  # a message that is written on
    assert not begun("q<think>a</think>b", MARKS["think"], "<think>a</think>b")
    assert not begun("q b <think> c", MARKS["think"], "b <think> c")

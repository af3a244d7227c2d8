"""What a body says of tools, how the model is told, and how it is known to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.api.dialect import find_dialect
from headrace.api.tools import Toolbox, toolbox
from headrace.config import Settings
from headrace.errors import InvalidRequest
from headrace.sources.card import CHATML, ModelCard
from headrace.sources.files import ModelFiles
from headrace.text import conversation
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import load_tokenizer
from headrace.text.tool_list import MAX_TOOLS, Tool, Tools

FAKE = load_tokenizer(ModelFiles("fake", "fake", Path()))


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def box(*tools: dict[str, Any], choice: Any = None, parallel: bool | None = None) -> Toolbox | None:
    return toolbox(msgspec.convert(list(tools), list[Tool]), choice, parallel)


def made(*tools: dict[str, Any], choice: Any = None, parallel: bool | None = None) -> Toolbox:
    found = box(*tools, choice=choice, parallel=parallel)
    assert found is not None
    return found


NAMED = {"type": "function", "function": {"name": "b"}}
A, B = function("a", parameters={"type": "object", "properties": {"x": {}}}), function("b")


def test_choices() -> None:
    assert box(A, choice="none") is None
    assert box() is None
    assert box(choice="auto") is None
    auto = made(A, B)
    assert (auto.must, auto.single, auto.bound) == (False, False, False)
    assert auto.names == {"a": ["x"], "b": []}
    assert made(A, B, choice="required").must
    one = made(A, B, choice=NAMED)
    assert (one.must, one.most, [offer.name for offer in one.offers]) == (True, 1, ["b"])
    assert len(one.shown) == 2  # the model still reads of all
    assert made(A, parallel=False).bound
    assert made(A, parallel=False).most == 1
    assert made(function("s", strict=True)).bound
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    some = made(A, B, choice=allowed)
    assert (some.must, list(some.names), some.single) == (True, ["b"], False)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([A, A], None, "tools"),
        ([{**A, "type": "custom"}], None, "tools"),
        ([A], "any", "tool_choice"),
        ([A], NAMED, "tool_choice"),
        ([A], {"type": "function"}, "tool_choice"),
        ([A], {"type": "allowed_tools"}, "tool_choice"),
        ([A], {"type": "function", "function": {"name": "a", "mode": "x"}}, "tool_choice"),
        ([A], {"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tool_choice"),
        ([], "required", "tool_choice"),
        ([], NAMED, "tool_choice"),
    ],
)
def test_refusals(tools: list[dict[str, Any]], choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        box(*tools, choice=choice)
    assert caught.value.param == param
    assert 0 < len(caught.value.message) < 200


@pytest.mark.parametrize(
    "tools", [[function("")], [function("a b")], [function("x" * 65)], [{}], [A] * (MAX_TOOLS + 1)]
)
def test_tools_that_are_none(tools: list[dict[str, Any]]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(tools, Tools)


def turn(role: str, content: str, **rest: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **rest}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_what_a_template_lacks_is_said_in_words() -> None:
    shown = conversation.with_tools([turn("user", "q")], made(A).shown)
    assert [one["role"] for one in shown] == ["system", "user"]
    assert '{"name": "a", "parameters": {"type": "object"' in shown[0]["content"]
    assert "<tool_call>\n{" in shown[0]["content"]
    longer = conversation.with_system([turn("system", "Be brief."), turn("user", "q")], "More.")
    assert longer[0] == turn("system", "Be brief.\n\nMore.")
    documents = conversation.with_documents([turn("user", "q")], [{"title": "T"}, {"text": "é"}])
    assert '[1] {"title": "T"}\n[2] {"text": "é"}' in documents[0]["content"]


def test_calls_of_earlier_turns_do_not_vanish() -> None:
    """B054, where the template knows nothing of calls."""
    turns = [
        turn("user", "q"),
        turn("assistant", "", tool_calls=[CALL, CALL]),
        turn("tool", "42.7", tool_call_id="1"),
        turn("tool", "43", tool_call_id="2"),
        turn("assistant", "So", tool_calls=[CALL]),
    ]
    shown = conversation.without_calls(turns)
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert shown == [
        turn("user", "q"),
        turn("assistant", f"{text}\n{text}"),
        turn(
            "user",
            "<tool_response>\n42.7\n</tool_response>\n<tool_response>\n43\n</tool_response>",
        ),
        turn("assistant", f"So\n{text}"),
    ]  # fmt: skip
    assert turns[1]["tool_calls"] == [CALL, CALL]


def test_system_messages_without_a_system_role() -> None:
    """B052."""
    turns = [turn("system", "S"), turn("system", "T"), turn("user", "q"), turn("assistant", "a")]
    assert conversation.without_system(turns) == [turn("user", "S\n\nT\n\nq"), turns[3]]
    assert conversation.without_system(turns[2:]) == turns[2:]
    for bad in ([turns[0]], [turns[0], turns[3]], [turns[2], turns[0]]):
        with pytest.raises(InvalidRequest) as caught:
            conversation.without_system(bad)
        assert caught.value.param == "messages"


NATIVE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}<tool_call>"
    "{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ documents }}"
)
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"


def card(template: str | None) -> ModelCard:
    return ModelCard(259, None, (256,), False, template, {})


def test_facts_of_templates() -> None:
    facts = {text: ChatTemplate(card(text)).facts for text in (CHATML, NATIVE, NO_SYSTEM, PARTS)}
    assert [fact.takes_tools for fact in facts.values()] == [False, True, False, False]
    assert [fact.shows_system for fact in facts.values()] == [True, True, False, True]
    assert [fact.wants_parts for fact in facts.values()] == [False, False, False, True]
    assert [fact.takes_documents for fact in facts.values()] == [False, False, True, False]
    assert not ChatTemplate(card(DROPS_SYSTEM)).facts.shows_system


@pytest.mark.parametrize(
    ("template", "setting", "form", "native"),
    [
        (CHATML, "auto", "hermes", False),
        (NATIVE, "auto", "hermes", True),
        (NATIVE, "llama", "llama", True),
        (NATIVE.replace("<tool_call>", "{{ x }}"), "auto", "hermes", False),
        (NATIVE.replace("<tool_call>", "[TOOL_CALLS]"), "auto", "mistral", True),
        (NATIVE, "none", "", True),
        (None, "auto", "hermes", False),
    ],
)
def test_dialects(template: str | None, setting: Any, form: str, native: bool) -> None:
    settings = Settings(model="fake", tool_parser=setting)
    facts = ChatTemplate(card(template)).facts
    found = find_dialect(settings, card(template), facts, FAKE)
    assert (found.form, found.native) == (form, native)
    assert found.marks is None
    if form:
        found.check_tools()
    else:
        with pytest.raises(InvalidRequest, match="--tool-parser"):
            found.check_tools()
    thinks = find_dialect(settings, card("</think>"), facts, FAKE)
    assert thinks.parser(None, True) is not None
    assert found.parser(None, False) is None
    assert thinks.begun("<think>\n", "")
    assert not found.begun("<think>\n", "")

"""Chat templates: what they are given, what they may do, what a client is told when they refuse."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from headrace.errors import InvalidRequest, ModelError
from headrace.sources.card import CHATML, ModelCard
from headrace.text.template import ChatTemplate


def template(text: str | None) -> ChatTemplate:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(ModelCard(10, 1, (2,), True, text, tokens))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_chatml() -> None:
    shown = template(CHATML).render([user("A"), {"role": "assistant", "content": ""}, user("B")])
    assert shown == (
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        template(CHATML).render([user("A")], add_generation_prompt=False).endswith("A<|im_end|>\n")
    )


def test_no_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        template(None).render([user("A")])
    assert caught.value.param == "messages"


def test_template_that_does_not_parse() -> None:
    with pytest.raises(ModelError, match="line 2"):
        template("ok\n{% if %}")


GEMMA_LIKE = """\
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
{{- '<t>' + message['role'] + '\\n' + message['content'] | trim + '</t>\\n' }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (["system", "user"], "System role not supported"),  # B052
        (["user", "user"], "must alternate"),  # B053
        (["assistant"], "must alternate"),
        (["tool"], "must alternate"),
    ],
)
def test_refusal_is_the_clients_fault(roles: list[str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        template(GEMMA_LIKE).render([{"role": role, "content": "x"} for role in roles])
    assert caught.value.param == "messages"
    assert "\n" not in caught.value.message
    assert "line" not in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ messages[7]['content'] }}",
        "{{ 1 // 0 }}",
        "{{ raise_exception('x' * 5000) }}",
        "{{ messages.append(1) }}",
        "{% include 'other' %}",
    ],
)
def test_every_failure_is_a_short_400(body: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(body).render([user("A")])
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "body",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ ('{0.__class__}'|attr('format'))(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__.os }}",
        "{{ self._TemplateReference__context.environment.__init__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_sandbox(body: str) -> None:
    """An attribute that is not allowed is undefined: it prints as nothing or raises when used."""
    shown = ""
    with contextlib.suppress(InvalidRequest):
        shown = template(body).render([user("A")])
    assert shown == ""


def test_sandbox_hides_the_globals_of_our_functions() -> None:
    body = "{{ raise_exception.__globals__ is defined or strftime_now.__code__ is defined }}"
    assert template(body).render([user("A")]) == "False"


def test_inputs_are_not_changed() -> None:
    message = {"role": "user", "content": "A", "name": None}
    template("{% set x = messages[0] %}{{ x.content }}").render([message])
    assert message == {"role": "user", "content": "A", "name": None}


CALLS = """\
{%- for m in messages %}[{{ m.role }}|{{ m.content }}|
{%- if 'tool_calls' in m %}{% for c in m.tool_calls %}
{{- c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endif %}]{% endfor %}"""


def test_null_and_missing_content_render_alike() -> None:
    """B054."""
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_code", "arguments": '{"a": 1}'},
    }
    result = {"role": "tool", "content": "42.7", "tool_call_id": "1"}
    null = {"role": "assistant", "content": None, "tool_calls": [call]}
    missing = {"role": "assistant", "tool_calls": [call]}
    shown = [template(CALLS).render([user("?"), turn, result]) for turn in (null, missing)]
    assert shown == ['[user|?|][assistant||get_code({"a": 1})][tool|42.7|]'] * 2
    assert call["function"] == {"name": "get_code", "arguments": '{"a": 1}'}


def test_null_tool_calls_are_none() -> None:
    turn = {"role": "assistant", "content": "A", "tool_calls": None}
    assert template(CALLS).render([turn]) == "[assistant|A|]"
    assert template(CALLS).render([{**turn, "tool_calls": []}]) == "[assistant|A|]"


def test_arguments_without_end_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    with pytest.raises(InvalidRequest, match="too deeply"):
        template(CALLS).render([{"role": "assistant", "tool_calls": [call]}])


def test_arguments_that_are_not_json_stay_text() -> None:
    call = {"function": {"name": "f", "arguments": "not json"}}
    turn = {"role": "assistant", "tool_calls": [call]}
    assert template(CALLS).render([turn]) == '[assistant||f("not json")]'


def test_environment_is_transformers() -> None:
    body = """\
{% for m in messages %}
    {% if m.content == 'skip' %}{% continue %}{% endif %}
{{ m | tojson }}
{% generation %}{{ bos_token }}{{ eos_token }}{% endgeneration %}
{% if m.content == '<é>' %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') | length }} {{ enable_thinking }} {{ tools }} {{ documents[0].title }}"""
    shown = template(body).render(
        [user("skip"), user("<é>"), user("never")],
        documents=[{"title": "D"}],
        enable_thinking=False,
    )
    assert shown == '{"role": "user", "content": "<é>"}\n<s></s>4 False None D'


def test_tojson_indent() -> None:
    body = "{{ messages[0] | tojson(indent=1) }}"
    assert template(body).render([user("A")]) == '{\n "role": "user",\n "content": "A"\n}'


@pytest.mark.parametrize("name", ["messages", "bos_token", "raise_exception", "strftime_now"])
def test_kwargs_cannot_replace_what_is_ours(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(CHATML).render([user("A")], **{name: "x"})  # type: ignore[arg-type]
    assert caught.value.param == "chat_template_kwargs"


def test_continue_final_message() -> None:
    turns = [user("A"), {"role": "assistant", "content": "The answer is "}]
    shown = template(CHATML).render(turns, add_generation_prompt=False, continue_final_message=True)
    assert shown.endswith("<|im_start|>assistant\nThe answer is ")
    with pytest.raises(InvalidRequest) as caught:
        template(CHATML).render(turns, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="does not show"):
        template("x").render(turns, add_generation_prompt=False, continue_final_message=True)

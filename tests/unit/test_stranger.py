"""Templates of requests: what they make, and that nothing they do reaches the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.errors import InvalidRequest
from headrace.text.conversation import Asked
from headrace.text.stranger import Strangers

ASKED = Asked([{"role": "user", "content": "é\n"}], tools=[{"function": {"name": "f"}}])


@pytest.fixture(scope="module")
def strangers() -> Iterator[Strangers]:
    made = Strangers({"bos_token": "<s>"}, limit_s=1.0)
    yield made
    made.close()


def test_a_prompt(strangers: Strangers) -> None:
    text = "{{ bos_token }}{% for m in messages %}{{ m.content }}|{{ m.role }} {% endfor %}"
    shown = strangers.prompt(text, ASKED)
    assert shown.startswith("<s>You may call functions")
    assert shown.endswith("é\n|user ")
    own = "{{ tools | tojson }}{{ messages[0].content }}{# tool_calls #}"
    assert strangers.prompt(own, ASKED) == '[{"function": {"name": "f"}}]é\n'


@pytest.mark.parametrize(
    ("template", "why", "param"),
    [
        ("{% if %}", "does not parse", "chat_template"),
        ("{{ raise_exception('no') }}", "no", "messages"),
        ("{{ 1 // 0 }}", "ZeroDivisionError", "messages"),
        # Past every limit but the process's own: time in one call, and memory.
        ("{{ [9, 9, 9] | sum(start=1) }}{{ ('9' * 10 ** 6 * 4) | wordwrap(1) | length }}", "",
         "chat_template"),
        ("{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
         "{% endfor %}{{ n.a }}", "takes", "chat_template"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered(strangers: Strangers, template: str, why: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        strangers.prompt(template, ASKED)
    assert why in caught.value.message
    assert caught.value.param == param
    assert len(caught.value.message) < 400
    assert strangers.prompt("x", Asked(ASKED.turns)) == "x"

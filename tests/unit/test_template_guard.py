"""Templates that would take all of the time or memory there is; a 400 in the end."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.sources.card import ModelCard
from headrace.text import template_guard
from headrace.text.template import ChatTemplate

USER = [{"role": "user", "content": "A"}]


def made(text: str) -> ChatTemplate:
    return ChatTemplate(ModelCard(10, 1, (2,), True, text, {}))


# Only with a `go`, so that what a template can do is found out at once.
HOSTILE = (
    "{% if go %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}",
    "{% if go %}{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}"
    "{% endfor %}{% endif %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{% if go %}{{ f(60) }}{% endif %}",
)
LARGE = (
    "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ ([1] * 10 ** 9) | length }}",
    "{{ 10 ** 9 * 'x' }}",
    "{{ 2 ** (10 ** 9) }}",
    "{% set n = namespace(i=3) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ messages | tojson(indent=10 ** 8) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit these run for hours."""
    template = made(text)
    monkeypatch.setattr(template_guard, "RENDER_S", 0.05)
    with pytest.raises(InvalidRequest, match=r"longer than 0.05 s") as caught:
        template.render(USER, go=True)
    assert caught.value.param == "messages"
    assert template.render(USER) == ""
    assert template.slowest_s > 0.04


@pytest.mark.parametrize("text", LARGE)
def test_size(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(text).render(USER)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%05d|%s' % (3, 'x') }}", "ababab1024300003|x"),
        ("{{ [1] + [2] }}{{ 1 + 1.5 }}{{ 2 * 3 }}", "[1, 2]2.56"),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %}", "1A"),
        ("{{ messages | map(attribute='content') | join(',') }}", "A"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'a b' | upper | replace('A', 'c') }}{{ 'x' | indent(2, true) }}", "c B  x"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "A"}]'),
    ],
)
def test_what_templates_do_works_as_ever(text: str, shown: Any) -> None:
    assert made(text).render(USER) == shown

"""Which characters of a rendered prompt are a message's content, and which are the template's."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.api.record import PromptSpan
from headrace.errors import HeadraceError
from headrace.text.conversation import Asked


def content_spans(text: str, asked: Asked, render: Callable[[Asked], str]) -> list[PromptSpan]:
    """Spans that cover `text`, the prompt that `render` made of `asked`.

    The conversation is rendered once more with marks around each content. Where that gives the same
    text but for the marks, spans are exact. A template that looks into contents may write something
    else then: contents are looked for in `text` one after another. White space around a content
    counts as the template's: many cut it off.
    """
    nonce = secrets.token_hex(8)
    turns = [_marked(turn, nonce, i) for i, turn in enumerate(asked.turns)]
    try:
        marked = render(msgspec.structs.replace(asked, turns=turns))
    except HeadraceError:  # it is longer, for one
        marked = ""
    roles = [str(turn["role"]) for turn in asked.turns]
    found = _read(marked, nonce, text)
    if found is None:
        found = _searched(text, [str(turn["content"]).strip() for turn in asked.turns])
    return _covering(text, found, roles)


def _marked(turn: dict[str, Any], nonce: str, i: int) -> dict[str, Any]:
    content: str = turn["content"]
    inside = content.strip()
    if not inside:
        return turn
    begin = content.index(inside)
    around = content[:begin], content[begin + len(inside) :]
    return {**turn, "content": f"{around[0]}<{nonce}+{i}>{inside}<{nonce}-{i}>{around[1]}"}


def _read(marked: str, nonce: str, text: str) -> list[tuple[int, int, int]] | None:
    """(start, end, turn) of each content; None if the marks changed more than themselves."""
    mark = re.compile(rf"<{nonce}([+-])(\d+)>")
    if mark.sub("", marked) != text:
        return None
    out, begun, shift = list[tuple[int, int, int]](), dict[int, int](), 0
    for match in mark.finditer(marked):
        at, turn = match.start() - shift, int(match[2])
        shift += len(match[0])
        if match[1] == "+":
            begun[turn] = at
        elif turn in begun:
            out.append((begun.pop(turn), at, turn))
    return out


def _searched(text: str, contents: list[str]) -> list[tuple[int, int, int]]:
    out, at = [], 0
    for turn, content in enumerate(contents):
        start = text.find(content, at) if content else -1
        if start >= 0:
            at = start + len(content)
            out.append((start, at, turn))
    return out


def _covering(text: str, found: list[tuple[int, int, int]], roles: list[str]) -> list[PromptSpan]:
    """With what lies between as the template's; it belongs to the role that it leads to."""
    spans, at = [], 0
    for start, end, turn in sorted(found):
        if start < at:
            continue  # contents inside contents: a template that shows one twice
        if start > at:
            spans.append(PromptSpan(at, start, "template", roles[turn]))
        spans.append(PromptSpan(start, end, "content", roles[turn]))
        at = end
    if at < len(text):
        spans.append(PromptSpan(at, len(text), "template", "assistant"))
    return spans

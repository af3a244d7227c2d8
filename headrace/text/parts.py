"""What a model says, told apart: text, reasoning and tool calls, in the order of saying.

A `Parser` makes parts of the text of a choice as it comes. Over an ended choice the parts of all
feeds and the flush, `joined`, do not depend on how the text was cut; so a streamed answer and a
whole one are the same. Without a parser, all text is one `Text`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True):
    """More of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of what the model thought before it answered."""

    text: str


class Call(msgspec.Struct, frozen=True):
    """A tool call begins. `index` counts the calls of one choice from 0."""

    index: int
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the arguments of the call `index`, which is the last one begun."""

    index: int
    text: str


Part = Text | Reasoning | Call | Arguments


class Parser(Protocol):
    """A feed/flush machine for the text of one choice, after stop strings. Never raises."""

    def feed(self, text: str) -> list[Part]:
        """The parts that can no longer change."""

    def flush(self) -> list[Part]:
        """What was held back. Call once, at the end of the choice, however it ended."""

    @property
    def thinking(self) -> bool:
        """The text so far ends inside reasoning."""

    @property
    def may_think(self) -> bool:
        """As `thinking`, or reasoning can still begin."""

    @property
    def called(self) -> bool:
        """There was a call, and the last one is whole."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call with all of its arguments."""

    id: str
    name: str
    arguments: str


class Said(msgspec.Struct, frozen=True):
    """The parts of one choice by kind. "" and (): none."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours of one kind put together; a call's arguments are one part."""
    out: list[Part] = []
    pieces: list[str] = []  # of the last part of `out`; [] if it is a Call

    def close() -> None:
        if len(pieces) > 1:
            out[-1] = msgspec.structs.replace(out[-1], text="".join(pieces))

    for part in parts:
        if isinstance(part, Call):
            close()
            pieces = []
            out.append(part)
        elif pieces and type(part) is type(out[-1]):
            pieces.append(part.text)
        else:
            close()
            pieces = [part.text]
            out.append(part)
    close()
    return out


def said(parts: Iterable[Part]) -> Said:
    """All of a choice's parts, by kind."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    arguments: list[list[str]] = []
    for part in parts:
        if isinstance(part, Text):
            texts.append(part.text)
        elif isinstance(part, Reasoning):
            reasoning.append(part.text)
        elif isinstance(part, Call):
            calls.append(part)
            arguments.append([])
        else:
            arguments[part.index].append(part.text)
    pairs = zip(calls, arguments, strict=True)
    made = tuple(ToolCall(call.id, call.name, "".join(pieces)) for call, pieces in pairs)
    return Said("".join(texts), "".join(reasoning), made)

"""Reasoning at the start of an answer: what stands between two marks, apart from the answer.

The marks and the blanks beside them belong to neither. Only the start of an answer counts: later
marks are text.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.text.parts import Part, Reasoning


class Marks(msgspec.Struct, frozen=True):
    """How a family of models writes its reasoning."""

    opens: str
    closes: str


MARKS: Mapping[str, Marks] = {
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed": Marks("<seed:think>", "</seed:think>"),
}


def marks_of(template: str | None) -> str:
    """The entry of MARKS that a chat template names; "" if none."""
    return next((name for name, m in MARKS.items() if template and m.closes in template), "")


def begun(prompt: str, marks: Marks, resumed: str = "") -> bool:
    """The prompt itself opens the reasoning; resumed: the assistant's text that it ends with."""
    before, opens, thought = resumed.rpartition(marks.opens)
    if opens and not before.strip():
        return marks.closes not in thought
    return prompt.rstrip().endswith(marks.opens)


class Thinking:
    """A feed/flush machine: parts, and the text that is not reasoning.

    inside: the prompt opened the reasoning. thinking: the text so far ends inside reasoning.
    """

    def __init__(self, marks: Marks, *, inside: bool = False) -> None:
        self._marks = marks
        self._held = ""
        self._started = False  # it is known whether the text begins with the opening mark
        self._blank = True  # no reasoning was handed out yet
        self._closed = False  # the closing mark was read
        self._over = False  # all that comes now is text
        self.thinking = inside

    @property
    def may_think(self) -> bool:
        """As `thinking`, or reasoning can still begin."""
        return self.thinking or not self._started

    def feed(self, text: str) -> tuple[list[Part], str]:
        """What is reasoning, and what is text."""
        if self._over:
            return [], text
        self._held += text
        if not self._started and not self._start():
            return [], ""
        parts = self._think() if self.thinking else []
        if self.thinking:
            return parts, ""
        if self._closed:
            self._held = self._held.lstrip()
        self._over = bool(self._held)
        rest, self._held = self._held, ""
        return parts, rest

    def flush(self) -> tuple[list[Part], str]:
        """What was held back."""
        rest, self._held = self._held, ""
        if not self.thinking:
            return [], rest
        shown = (rest.lstrip() if self._blank else rest).rstrip()
        return [Reasoning(shown)] if shown else [], ""

    def _start(self) -> bool:
        bare, opens = self._held.lstrip(), self._marks.opens
        if bare.startswith(opens):
            self._held, self.thinking, self._started = bare[len(opens) :], True, True
        elif not opens.startswith(bare):
            self._started = True
        return self._started

    def _think(self) -> list[Part]:
        """Hand out reasoning up to its last character that is no blank; hold the rest back."""
        closes = self._marks.closes
        if self._blank:
            self._held = self._held.lstrip()
        found = self._held.find(closes)
        end = found if found >= 0 else len(self._held) - overlap(self._held, closes)
        shown = self._held[:end].rstrip()
        self._blank = self._blank and not shown
        if found >= 0:
            self.thinking, self._closed = False, True
            self._held = self._held[found + len(closes) :]
        else:
            self._held = self._held[len(shown) :]
        return [Reasoning(shown)] if shown else []


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0

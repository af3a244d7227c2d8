"""The parser of one choice: reasoning first, then text and tool calls."""

from __future__ import annotations

from headrace.text.calls.calls import Calls
from headrace.text.parts import Part, Text
from headrace.text.thinking import Thinking


class AnswerParser:
    """See `parts.Parser`. None: this model does not do that, or was not asked for it."""

    def __init__(self, thinking: Thinking | None, calls: Calls | None) -> None:
        self._thinking, self._calls = thinking, calls

    @property
    def thinking(self) -> bool:
        return self._thinking is not None and self._thinking.thinking

    @property
    def may_think(self) -> bool:
        return self._thinking is not None and self._thinking.may_think

    @property
    def called(self) -> bool:
        return self._calls is not None and self._calls.called

    def feed(self, text: str) -> list[Part]:
        if self._thinking is None:
            return self._answer(text)
        parts, rest = self._thinking.feed(text)
        return parts + self._answer(rest)

    def flush(self) -> list[Part]:
        parts, rest = self._thinking.flush() if self._thinking is not None else ([], "")
        parts += self._answer(rest)
        return parts + self._calls.flush() if self._calls is not None else parts

    def _answer(self, text: str) -> list[Part]:
        if not text:
            return []
        return [Text(text)] if self._calls is None else self._calls.feed(text)

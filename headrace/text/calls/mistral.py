"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and newer: [TOOL_CALLS]name{...}
with or without [CALL_ID]... and [ARGS] between name and arguments."""

from __future__ import annotations

import re
import secrets
import string

from headrace.text.calls.calls import JsonCalls, Names
from headrace.text.calls.json_call import BLANKS, JsonValue

_HEAD = re.compile(r"[A-Za-z0-9_.:/\[\]\-\s]*")
_MOST_HEAD = 300  # characters before the arguments
_ALPHABET = string.ascii_letters + string.digits


class MistralCalls(JsonCalls):
    """See `calls.Calls`. `_where`: start (behind the mark), list (between two objects of a list),
    object, or value (the arguments of the newer form)."""

    marks = ("[TOOL_CALLS]",)

    def __init__(self, tools: Names, *, forced: bool = False) -> None:
        super().__init__(tools, forced=forced)
        self._where = "start"
        self._value = JsonValue()

    @staticmethod
    def _new_id() -> str:
        """Mistral's templates take nine letters and digits and nothing else."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def _opened(self) -> None:
        super()._opened()
        self._where, self._value = "start", JsonValue()

    def _inside(self) -> bool:
        if self._where == "object":
            return self._object()
        if self._where == "value":
            return self._arguments()
        bare = self._held.lstrip(BLANKS + "," if self._where == "list" else BLANKS)
        gap = len(self._held) - len(bare)
        if not bare:
            return False
        if self._where == "list":
            self._between(bare[0], gap)
        elif bare[0] == "[":
            self._used(gap + 1)
            self._where = "list"
        else:
            return self._head()
        return True

    def _between(self, char: str, gap: int) -> None:
        """The next object of a list, or its end."""
        if char == "{":
            if self._raw is None:
                self._again(self._held[:gap])
                self._held = self._held[gap:]
            else:
                self._used(gap)
            self._where = "object"
            return
        self._used(gap + (char == "]"))
        if self._raw is None:
            self._close()
        else:
            self._reject()

    def _object(self) -> bool:
        if not self._read_call():
            return not self._in
        if self._call.broken:
            self._close()
        self._where = "list"
        return True

    def _head(self) -> bool:
        """The name, and whatever stands before the arguments."""
        match = _HEAD.match(self._held)
        end = match.end() if match is not None else 0
        name = self._held[:end].partition("[")[0].strip()
        if end < _MOST_HEAD and self._held[end : end + 1] == "{" and name:
            self._used(end)
            self._begin(name)
            self._where = "value"
        elif end >= _MOST_HEAD or end < len(self._held):
            self._used(min(end, _MOST_HEAD))
            self._reject()
        else:
            return False
        return True

    def _arguments(self) -> bool:
        end = self._value.feed(self._held, 0)
        self._argue(self._held[:end])
        self._used(end)
        if self._value.done or self._value.broken:
            self.called = self._value.done
            self._close()
            return True
        return False

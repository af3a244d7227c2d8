"""A tool call written as a JSON object, read as it comes: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *ARGUMENTS)
BLANKS = " \t\r\n"


class JsonValue:
    """Finds the end of one JSON value. It follows strings and brackets, and checks nothing else.

    `done`: the end was found. `broken`: it is no JSON.
    """

    __slots__ = ("_depth", "_escaped", "_quoted", "broken", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self.done = self.broken = False

    def feed(self, text: str, at: int) -> int:
        """Read on from text[at]; where it stopped: behind the value, or at the end of `text`."""
        for i in range(at, len(text)):
            char = text[i]
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
                    if self._depth == 0:
                        self.done = True
                        return i + 1
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    return i + 1 + self._depth  # a bracket that was not opened here is not ours
            elif self._depth == 0 and (char in BLANKS or char == ","):
                self.done = True
                return i
            elif char == "<":  # the mark that ends a call
                self.broken = True
                return i
        return len(text)


class JsonCall:
    """Reads one call. `name` and `fresh`, the pieces of the arguments not yet handed on, fill up.

    begun: the arguments have begun. done: the object is complete. broken: it is no call.
    names: the only names that a call has here, for forms that open like any object; None: any.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self.name: str | None = None
        self.fresh: list[str] = []
        self.begun = self.done = self.broken = False
        self._state = "open"
        self._key = ""
        self._token = ""
        self._value = JsonValue()
        self._streams = False

    def feed(self, text: str, at: int) -> int:
        """Read on from text[at]; where it stopped: behind the object, or at the end of `text`."""
        while at < len(text) and not (self.done or self.broken):
            if self._state in ("key text", "value text"):
                at = self._read(text, at)
            else:
                at += self._between(text[at])
        return at

    def _between(self, char: str) -> int:
        """One character outside of keys and values; how many of it were used up."""
        if char in BLANKS:
            return 1
        if self._state == "value":
            self._streams = self._key in ARGUMENTS and not self.begun and char == "{"
            self.begun |= self._streams
            self._start("value text")
            return 0
        if self._state == "open" and char == "{":
            self._state = "key"
        elif self._state == "colon" and char == ":":
            self._state = "value"
        elif self._state == "key" and char == '"':
            self._start("key text")
            return 0
        elif self._state == "key" and char == "}":
            self.done = True
        elif self._state != "key" or char != ",":
            self.broken = True
            return 0
        return 1

    def _start(self, state: str) -> None:
        self._state, self._token, self._value = state, "", JsonValue()

    def _read(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        if self._state == "value text" and self._streams:
            self.fresh.append(text[at:end])
        else:
            self._token += text[at:end]
        self.broken |= self._value.broken
        if self._value.done:
            if self._state == "key text":
                self._key = str(_decoded(self._token))
                self._state = "colon"
                self.broken |= self._names is not None and self._key not in _KEYS
            else:
                self._end()
        return end

    def _end(self) -> None:
        """A value is complete."""
        self._state = "key"
        if self._streams:
            return
        if self._key == "name":
            self._call(_decoded(self._token))
        elif self._key in ARGUMENTS and not self.begun:
            value = _decoded(self._token)
            # Some models write the arguments as JSON inside of a string.
            text = "{}" if value in (None, "") else value
            self.begun, self.broken = True, not isinstance(text, str)
            self.fresh.append(str(text).encode("utf-8", "replace").decode())

    def _call(self, name: Any) -> None:
        good = isinstance(name, str) and name.isprintable() and name and self.name is None
        if good and (self._names is None or name in self._names):
            self.name = name
        else:
            self.broken = True


def _decoded(token: str) -> Any:
    """The value; what cannot be read is False, which no caller takes for one."""
    try:
        return json.loads(token)
    except (ValueError, RecursionError):
        return False

"""Pythonic calls: [get(city="Rome", days=3), now()], with or without marks around the list."""

from __future__ import annotations

import json
import re

from headrace.text.calls.calls import Calls, Names
from headrace.text.calls.python_value import json_of

_ENDS = ("<|tool_call_end|>", "<|python_end|>")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)", re.ASCII)
_OPENS, _CLOSES = "([{", ")]}"


class PythonicCalls(Calls):
    """See `calls.Calls`. Without a mark, an answer that begins with a list is calls only if its
    first item calls a tool. Arguments are handed out one by one, as JSON.

    `_where`: list (before it), name, argument, next (behind a call), end (behind the list).
    """

    marks = ("<|tool_call_start|>", "<|python_start|>", "<|python_tag|>")
    bare = "["

    def __init__(self, tools: Names, *, forced: bool = False) -> None:
        super().__init__(tools, forced=forced)
        self._where, self._token, self._name = "list", "", ""
        self._given = 0  # arguments of this call
        self._depth, self._quote, self._escaped = 0, "", False

    def _opened(self) -> None:
        self._where, self._token = "list", ""

    def _inside(self) -> bool:
        if self._where == "end":
            return self._leave()
        where = self._where
        for at, char in enumerate(self._held):
            good = self._argument(char) if where == "argument" else self._between(char)
            if not good:
                self._used(at)
                if self._raw is None:
                    self._close()
                else:
                    self._reject()
                return True
            if self._where != where or (where == "argument" and not self._token):
                self._used(at + 1)
                return True
        self._used(len(self._held))
        return False

    def _between(self, char: str) -> bool:
        """One character outside of arguments; whether it may stand there."""
        where = self._where
        if where == "name" and char == "(":
            return self._call()
        if where == "name" and (char.isidentifier() or (self._token and char in "0123456789.")):
            self._token += char
            return True
        if char.isspace():
            return not self._token
        if (where, char) in (("list", "["), ("next", ",")):
            self._where = "name"
        elif where == "next" and char == "]":
            self._where = "end"
        else:
            return False
        return True

    def _call(self) -> bool:
        name, self._token = self._token, ""
        if not name or (name not in self._tools and not self._marked):
            return False
        self._begin(name)
        self._name, self._given, self._where = name, 0, "argument"
        self._depth, self._quote, self._escaped = 0, "", False
        return True

    def _argument(self, char: str) -> bool:
        """One character of an argument. `_token` is empty again when it is complete."""
        if self._quote:
            ends = char == self._quote and not self._escaped
            self._escaped = char == "\\" and not self._escaped
            self._quote = "" if ends else self._quote
        elif self._depth == 0 and char in ",)":
            self._give()
            if char == ")":
                self._argue("}" if self._given else "{}")
                self._where, self.called = "next", True
            return True
        elif char in "\"'":
            self._quote = char
        elif char in _OPENS:
            self._depth += 1
        elif char in _CLOSES:
            self._depth -= 1
        self._token += char
        return self._depth >= 0

    def _give(self) -> None:
        """An argument is complete."""
        text, self._token = self._token, ""
        if not text.strip():
            return
        match = _KEYWORD.match(text)
        names = self._tools.get(self._name, ())
        if match is not None:
            name, value = match[1], text[match.end() :]
        else:
            name = names[self._given] if self._given < len(names) else f"arg{self._given}"
            value = text
        self._argue(f"{', ' if self._given else '{'}{json.dumps(name)}: {json_of(value)}")
        self._given += 1

    def _leave(self) -> bool:
        """An end mark may stand behind the list."""
        bare = self._held.lstrip()
        for end in _ENDS:
            if bare.startswith(end):
                self._held = bare[len(end) :]
                self._close()
                return True
        if any(end.startswith(bare) for end in _ENDS):
            return False
        self._close()
        return True

"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one after another."""

from __future__ import annotations

from headrace.text.calls.calls import JsonCalls
from headrace.text.thinking import overlap

_END = "</tool_call>"


class HermesCalls(JsonCalls):
    """See `calls.Calls`. A missing end tag is forgiven."""

    marks = ("<tool_call>",)

    def _inside(self) -> bool:
        if not (self._call.done or self._call.broken) and not self._read_call():
            return not self._in  # it was text: go on outside
        if self._call.broken:  # after its arguments began: nothing more can be made of it
            return self._skip()
        bare = self._held.lstrip()
        if bare.startswith(_END):
            self._held = bare[len(_END) :]
        elif _END.startswith(bare):
            return False
        self._close()
        return True

    def _skip(self) -> bool:
        found = self._held.find(_END)
        if found < 0:
            self._held = self._held[len(self._held) - overlap(self._held, _END) :]
            return False
        self._held = self._held[found + len(_END) :]
        self._close()
        return True

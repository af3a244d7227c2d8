"""Llama 3: {"name": ..., "parameters": {...}}, with or without <|python_tag|>; `;` between two."""

from __future__ import annotations

from headrace.text.calls.calls import JsonCalls
from headrace.text.calls.json_call import BLANKS


class LlamaCalls(JsonCalls):
    """See `calls.Calls`. Without the mark, an answer that begins with an object is a call only if
    it names a tool."""

    marks = ("<|python_tag|>",)
    bare = "{"
    weak = True

    def _inside(self) -> bool:
        if not (self._call.done or self._call.broken) and not self._read_call():
            return not self._in
        bare = self._held.lstrip(BLANKS + ";,")
        if not bare and not self._call.broken:
            return False
        if bare.startswith("{") and not self._call.broken:
            gap = self._held[: len(self._held) - len(bare)]
            self._held = bare
            self._again(gap)
        else:
            self._close()
        return True

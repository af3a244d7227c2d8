"""The machine under every form: text up to a call, the call, text again."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from headrace.text.calls.json_call import JsonCall
from headrace.text.parts import Arguments, Call, Part, Text
from headrace.text.thinking import overlap

Names = Mapping[str, Sequence[str]]  # tool -> the names of its parameters, in their order


class Calls:
    """A feed/flush machine. A form says how a call opens and reads it in `_inside`.

    What opens like a call and is none comes out as the text that it is; with `forced` (a grammar
    leaves nothing but calls) it is the beginning of one that was cut, and is dropped. Blanks
    between text and a call belong to neither.
    """

    marks: tuple[str, ...] = ()  # a call may follow each of them, anywhere
    bare = ""  # a character that opens a call without a mark, at the very start

    def __init__(self, tools: Names, *, forced: bool = False) -> None:
        self._tools = tools
        self._forced = forced
        self._held = ""
        self._out: list[Part] = []
        self._raw: list[str] | None = None  # read since a call was opened; None: it is one
        self._in = False  # a call is open
        self._first = True  # nothing but blanks so far
        self._texted = False  # text was handed out
        self._behind = False  # directly behind a call
        self._marked = False  # the open call began with a mark
        self._count = 0
        self.called = False  # there was a call, and the last one is whole

    def feed(self, text: str) -> list[Part]:
        """See `parts.Parser`."""
        self._held += text
        while self._held and (self._inside() if self._in else self._outside()):
            pass
        out, self._out = self._out, []
        return out

    def flush(self) -> list[Part]:
        """See `parts.Parser`."""
        if self._in and self._raw is not None:
            self._reject()
        if not self._in:
            self._say(self._held)
        self._held = ""
        out, self._out = self._out, []
        return out

    # What a form says.

    def _inside(self) -> bool:
        """Read on in an open call; whether anything was done."""
        raise NotImplementedError

    def _opened(self) -> None:
        """A call was opened: begin to read one."""

    @staticmethod
    def _new_id() -> str:
        return "call_" + secrets.token_hex(12)

    # What a form calls.

    def _used(self, size: int) -> None:
        """So many characters of an open call were read."""
        if self._raw is not None:
            self._raw.append(self._held[:size])
        self._held = self._held[size:]

    def _begin(self, name: str) -> None:
        """The call is one."""
        self._out.append(Call(self._count, self._new_id(), name))
        self._count += 1
        self._raw, self.called = None, False

    def _argue(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text:
            self._out.append(Arguments(self._count - 1, text))

    def _again(self, raw: str = "") -> None:
        """Another call may begin here; `raw`: what opened it."""
        self._raw = [raw]
        self._opened()

    def _close(self) -> None:
        """Behind the calls."""
        self._in, self._behind, self._raw = False, True, None

    def _reject(self) -> None:
        """It is no call, but text."""
        assert self._raw is not None, "a call that began is one"
        text = "".join(self._raw)
        self._in, self._raw, self._first = False, None, False
        self._say(text)

    # Text.

    def _outside(self) -> bool:
        places = [(self._held.find(mark), mark) for mark in self.marks]
        found = min(((at, -len(mark), mark) for at, mark in places if at >= 0), default=None)
        bare = self._held.lstrip()
        if self._first and self.bare and bare.startswith(self.bare):
            self._open(len(self._held) - len(bare), 0)
            return True
        if found is not None:
            self._open(found[0], len(found[2]))
            return True
        keep = max((overlap(self._held, mark) for mark in self.marks), default=0)
        shown = self._held[: len(self._held) - keep].rstrip()
        self._say(shown)
        self._held = self._held[len(shown) :]
        return False

    def _open(self, at: int, mark: int) -> None:
        """A call may begin at `at`, behind a mark of so many characters."""
        shown = self._held[:at].rstrip()
        self._say(shown)
        self._raw = [self._held[len(shown) : at + mark]]
        self._held = self._held[at + mark :]
        self._in, self._first, self._behind, self._marked = True, False, False, mark > 0
        self._opened()

    def _say(self, text: str) -> None:
        if self._forced:
            return
        if self._behind and text:
            bare = text.lstrip()
            if not bare:
                return
            text = text if self._texted else bare
            self._behind = False
        if text:
            self._out.append(Text(text))
            self._texted, self._first = True, False


class JsonCalls(Calls):
    """Forms whose calls are JSON objects."""

    weak = False  # without a mark, only objects that name an offered tool are calls

    def __init__(self, tools: Names, *, forced: bool = False) -> None:
        super().__init__(tools, forced=forced)
        self._call = JsonCall()

    def _opened(self) -> None:
        self._call = JsonCall(self._tools if self.weak and not self._marked else None)

    def _read_call(self) -> bool:
        """Read on in the object. False: it wants more; or it was none, and is text again."""
        call = self._call
        self._used(call.feed(self._held, 0))
        whole = call.done and not (self.weak and not self._marked)
        if self._raw is not None and call.name is not None and (call.begun or whole):
            self._begin(call.name)
        if self._raw is None:
            self._argue("".join(call.fresh))
            call.fresh.clear()
            if call.done and not call.begun:
                self._argue("{}")
            self.called = call.done
            return call.done or call.broken
        if call.done or call.broken:
            self._reject()
        return False

"""Outbox: what the next turn hands to each API process, in one message each."""

from __future__ import annotations

from headrace.messages import Logprobs, TokenOut


class Outbox:
    """One open `TokenOut` per owner that has something to hear."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[int, TokenOut] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def of(self, owner: int) -> TokenOut:
        """The message for `owner`, to be appended to."""
        out = self._open.get(owner)
        if out is None:
            out = self._open[owner] = TokenOut([], [], [], [], [], [], [], [], [])
        return out

    @staticmethod
    def note(out: TokenOut, entry: Logprobs) -> None:
        """What is said of the token appended last."""
        out.logprobs += [None] * (len(out.tokens) - 1 - len(out.logprobs))
        out.logprobs.append(entry)

    def discard(self, owner: int) -> None:
        """The owner is gone."""
        self._open.pop(owner, None)

    def take(self) -> dict[int, TokenOut]:
        """Everything so far; starts afresh."""
        taken, self._open = self._open, {}
        for out in taken.values():
            if out.logprobs:
                out.logprobs += [None] * (len(out.tokens) - len(out.logprobs))
        return taken

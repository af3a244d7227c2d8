"""What a protocol writes into a stream: the seam between `EventStream` and one file a protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.api.answer import Answer
from headrace.api.errors import event_of
from headrace.api.logprobs import Entry
from headrace.errors import HeadraceError
from headrace.text.parts import Part


class Events:
    """The bytes of one stream: begin; opened once a prompt; text, parts, told as they come; finish
    once a choice; ended, end. Or, when the request fails after the first byte, failed instead of
    the rest.

    Every bytes is one or more whole events, b"" none. continuous_usage: every event has the counts.
    """

    continuous_usage = False

    def begin(self, answer: Answer) -> list[bytes]:
        """What goes first, together with the first news."""
        raise NotImplementedError

    def text(self, index: int, text: str) -> bytes:
        """New text of a choice that has no parser. The way of most tokens: keep it cheap."""
        raise NotImplementedError

    def parts(self, index: int, parts: Sequence[Part]) -> list[bytes]:
        """New parts of a choice; neighbours of one kind are already put together."""
        raise NotImplementedError

    def cited(self, index: int, annotations: list[dict[str, Any]]) -> bytes:
        """Citations of a choice that is about to finish; b"" in protocols that have none."""
        return b""

    def finish(self, index: int, reason: str, stop_reason: str | int | None) -> bytes:
        """A choice ended: `stop`, `length`, `tool_calls` or `content_filter`."""
        raise NotImplementedError

    async def ended(self, answer: Answer) -> None:
        """All choices ended as they should: what must be done before `end` can say so."""

    def end(self, answer: Answer) -> bytes:
        """All choices ended; `answer` has the usage."""
        raise NotImplementedError

    def failed(self, error: HeadraceError) -> bytes:
        """The last event of a stream that was cut short."""
        return event_of(error)

    # Only for who shows tokens, echoes, or usage in every chunk (`Prepared.shown`, `Reply`).

    def told(
        self, index: int, parts: Sequence[Part], entries: list[Entry], offset: int
    ) -> list[bytes]:
        """As `parts`, which may be empty here, with what is said of tokens."""
        raise NotImplementedError

    def echoed(self, entries: list[Entry]) -> dict[str, Any] | None:
        """What is said of the tokens of an echo."""
        raise NotImplementedError

    def opened(
        self, index: int, echo: str, logprobs: dict[str, Any] | None, prompt: list[int]
    ) -> bytes:
        """What goes before a choice's own text."""
        raise NotImplementedError

    def with_usage(self, event: bytes, usage: Mapping[str, Any]) -> bytes:
        """One of these events with the counts so far."""
        raise NotImplementedError

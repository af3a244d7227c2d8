"""A worker's event stream on its way to the client: read as it passes, cut anywhere.

Only whole events leave here, so an error event can follow whatever was sent. Workers write whole
events, so this holds nothing back in practice; an event over `MAX_EVENT_BYTES` passes as it comes,
unread.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headrace.foreign_json import Malformed, read_json

MAX_EVENT_BYTES = 256 * 1024
# No request has more; JSON knows integers that no float and no message can hold.
MOST_TOKENS = 2**32
_BLANK = re.compile(rb"(?:\r\n|\n|\r(?=[^\n]))(?:\r\n|\n|\r(?=[^\n]))")
_LINE = re.compile(r"\r\n|\n|\r")
# How an event ends that has no usage, of a worker that was asked for it. These bytes can be nothing
# else: in a string the quotes would be escaped.
_NO_USAGE = b',"usage":null}\n\n'
LAST_EVENTS = frozenset(
    {"message_stop", "response.completed", "response.failed", "response.incomplete"}
)


class Usage(msgspec.Struct):
    """What a worker says a request used; -1 = it has not said."""

    prompt_tokens: int = -1
    output_tokens: int = -1
    cached_tokens: int = -1

    def read(self, said: Any) -> None:
        """Take over what a `usage` object of OpenAI or Anthropic says; anything else is nothing."""
        if not isinstance(said, dict):
            return
        details = said.get("prompt_tokens_details") or said.get("input_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if cached is None:
            cached = said.get("cache_read_input_tokens")
        prompt = said.get("prompt_tokens", _input_tokens(said))
        output = said.get("completion_tokens", said.get("output_tokens"))
        self.prompt_tokens = _count(prompt, self.prompt_tokens)
        self.output_tokens = _count(output, self.output_tokens)
        self.cached_tokens = _count(cached, self.cached_tokens)


def _input_tokens(said: dict[str, Any]) -> int:
    """All tokens of a prompt, where they are called so; -1 = it is not said. Anthropic counts those
    that its cache had, or got, apart from the others."""
    beside = ("cache_read_input_tokens", "cache_creation_input_tokens")
    plain = _count(said.get("input_tokens"), -1)
    return plain if plain < 0 else plain + sum(_count(said.get(name), 0) for name in beside)


def _count(said: Any, before: int) -> int:
    plain = isinstance(said, int) and said is not True
    return said if plain and 0 <= said <= MOST_TOKENS else before


class EventStream:
    """A feed machine: bytes of the worker in, bytes for the client out.

    strip_usage: events with usage and no choice are left out, and so is the null in the others, for
    the client did not ask for them.
    """

    def __init__(self, strip_usage: bool) -> None:
        self.usage = Usage()
        self.error: dict[str, Any] | None = None  # the first in-band error
        self.begins_with_error = False
        self.ended = False  # a terminal event came
        self.events = 0  # that carried data
        self.inside = False  # of an event that passes as it comes: part of it was sent
        self._strip = strip_usage
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """What may be sent now."""
        if not self._rest and not self.inside and data.endswith(b"\n\n") and b"\r" not in data:
            return self._read(data)
        start = max(0, len(self._rest) - 3)
        self._rest += data
        end = self._boundary(start)
        out = b""
        if end:
            whole = bytes(self._rest[:end])
            del self._rest[:end]
            out = self._finish(whole) if self.inside else self._read(whole)
        if self.inside:
            keep = min(3, len(self._rest))  # a boundary may be cut in two
        elif len(self._rest) > MAX_EVENT_BYTES:
            self.inside, keep = True, 3
        else:
            return out
        passed = bytes(self._rest[: len(self._rest) - keep])
        del self._rest[: len(self._rest) - keep]
        return out + passed

    def flush(self) -> bytes:
        """The stream ended: what was held back, though it is no whole event."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest if self.inside else self._read(rest)

    def _boundary(self, start: int) -> int:
        """End of the last whole event in what is held; 0 = none."""
        if b"\r" not in self._rest:
            at = self._rest.rfind(b"\n\n", start)
            return at + 2 if at >= 0 else 0
        ends = [match.end() for match in _BLANK.finditer(self._rest, start)]
        if self._rest.endswith((b"\r\n\r\n", b"\n\n")):
            return len(self._rest)
        return ends[-1] if ends else 0

    def _finish(self, whole: bytes) -> bytes:
        """The end of an event that was too large to read, and events behind it."""
        self.inside = False
        self.events += 1
        match = _BLANK.search(whole)
        end = match.end() if match else len(whole)
        return whole[:end] + self._read(whole[end:])

    def _read(self, whole: bytes) -> bytes:
        """Look at whole events; only what may matter is decoded."""
        if b"data" not in whole:
            return whole  # comments keep a connection alive
        if self._strip:
            whole = whole.replace(_NO_USAGE, b"}\n\n")
        plain = b"event:" not in whole and b'"error"' not in whole and b"[DONE]" not in whole
        if plain and b'"usage"' not in whole:
            self.events += 1
            return whole
        kept = [event for event in _events(whole) if not self._look(event)]
        return b"".join(kept)

    def _look(self, event: bytes) -> bool:
        """Read one event; whether it is to be left out."""
        name, payload = _fields(event)
        if not payload:
            return False
        self.events += 1
        if payload.strip() == "[DONE]" or name in LAST_EVENTS:
            self.ended = True
        if '"usage"' not in payload and '"error"' not in payload and name != "error":
            return False
        try:
            said = read_json(payload, object)
        except Malformed:
            return False
        if not isinstance(said, dict):
            return False
        error = said.get("error") or (said if name == "error" else None)
        if error and self.error is None:
            self.error = error if isinstance(error, dict) else {"message": str(error)}
            self.begins_with_error = self.events == 1
        for holder in (said.get("message"), said.get("response"), said):
            if isinstance(holder, dict):
                self.usage.read(holder.get("usage"))
        return self._strip and said.get("choices") == [] and said.get("usage") is not None


def _events(whole: bytes) -> list[bytes]:
    """Whole events, each with its blank line."""
    if b"\r" not in whole:
        *events, rest = whole.split(b"\n\n")
        out = [event + b"\n\n" for event in events]
        return [*out, rest] if rest else out
    out, at = [], 0
    for match in _BLANK.finditer(whole):
        if match.start() >= at:
            out.append(whole[at : match.end()])
            at = match.end()
    if at < len(whole):
        out.append(whole[at:])
    return out


def _fields(event: bytes) -> tuple[str, str]:
    """Name and data of one event, as the standard reads them."""
    line_end = event.find(b"\n")
    if event.startswith(b"data: ") and event[line_end:] == b"\n\n" and b"\r" not in event:
        return "", event[6:line_end].decode("utf-8", "replace")  # as nearly all are
    name, data = "", []
    for line in _LINE.split(event.decode("utf-8", "replace")):
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif field == "event":
            name = value.removeprefix(" ")
    return name, "\n".join(data)

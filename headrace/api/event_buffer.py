"""The newest events of one stream, numbered, within a bound of bytes."""

from __future__ import annotations

from collections import deque

from headrace.errors import InvalidRequest, NotFound

COMMENT = b":"


class EventBuffer:
    """Events in, numbered events out. Numbers begin with 1.

    Events up to `sent` were given to a reader and may be forgotten, the oldest first, once all take
    more than `max_bytes`; the others wait. `full`: so many wait that the writer should.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name, self._max_bytes = name.encode(), max_bytes
        self._events: deque[bytes] = deque()
        self._first = 1  # the number of the oldest that is left
        self._bytes = 0
        self._waiting_bytes = 0
        self.sent = 0

    @property
    def last(self) -> int:
        """The number of the newest event; 0 = none yet."""
        return self._first + len(self._events) - 1

    @property
    def full(self) -> bool:
        """Half of the room is for what was sent, and may have been lost on the way."""
        return self._waiting_bytes > self._max_bytes // 2

    @property
    def size_bytes(self) -> int:
        """Of all events that are left."""
        return self._bytes

    def write(self, data: bytes) -> None:
        """Whole events, each ended by a blank line. Comments are no events."""
        *events, rest = data.split(b"\n\n")
        assert not rest, "whole events"
        for event in events:
            if event.startswith(COMMENT):
                continue
            numbered = b"id: %b.%d\n%b\n\n" % (self._name, self.last + 1, event)
            self._events.append(numbered)
            self._bytes += len(numbered)
            self._waiting_bytes += len(numbered)
        self._trim()

    def after(self, number: int) -> bytes:
        """All events behind `number`; b"" if there are none yet.

        Raises NotFound for those that were forgotten, InvalidRequest for a number that never was.
        """
        if number > self.last:
            raise InvalidRequest(f"there was no event {number} yet", param="Last-Event-ID")
        if number < self._first - 1:
            raise NotFound(
                f"events before {self._first} are not kept any more", code="events_forgotten"
            )
        skipped = number - self._first + 1
        return b"".join(list(self._events)[skipped:] if skipped else self._events)

    def mark_sent(self, number: int) -> None:
        """A reader was given all events up to `number`."""
        if number > self.sent:
            skipped = max(0, self.sent - self._first + 1)
            given = list(self._events)[skipped : number - self._first + 1]
            self._waiting_bytes -= sum(map(len, given))
            self.sent = number
            self._trim()

    def _trim(self) -> None:
        while self._bytes > self._max_bytes and self._first <= self.sent:
            self._bytes -= len(self._events.popleft())
            self._first += 1

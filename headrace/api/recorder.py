"""Recorder: the newest requests that one HTTP process served, in two rings.

All are in the ring of light records; those that asked to be recorded in full are in a ring of their
own instead, so that a busy server's other requests do not push them out.

Every request has a record of its own. Clients may give several the same id, so a record also has a
name, `ID~...`, which no other has in any process of the server; an id stands for the newest of its
requests.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter, deque
from collections.abc import Mapping
from heapq import merge
from itertools import islice

from headrace.api.metering import Caller
from headrace.api.record import Full, Record
from headrace.errors import InvalidRequest

HEADER = b"x-headrace-record"
FULL = b"full"
MOST_FULL = 8  # requests recorded in full at the same time, in one process
MOST_FULL_A_KEY = 4  # of one API key
MOST_SAME = 50  # of an id, named beside the one that is told


class Recorder:
    """`count` light records, and as many full ones as `full_bytes` hold; older ones go.

    count = 0: none of either is kept. offers_full: requests may be recorded in full. filtered:
    answers are changed before they are sent, so only admins may have what the model said. always: a
    record is made of every request, kept or not.
    """

    def __init__(
        self,
        model: str,
        count: int,
        full_bytes: int,
        *,
        offers_full: bool,
        filtered: bool = False,
        always: bool = False,
    ) -> None:
        self._model, self._count, self._most_bytes = model, count, full_bytes
        self._offers_full = offers_full and count > 0
        self._filtered, self._always = filtered, always
        self._process, self._numbers = secrets.token_hex(4), itertools.count()  # in names
        self._light: deque[Record] = deque(maxlen=count)  # oldest first
        self._full: deque[Record] = deque()
        self._running: Counter[str] = Counter()  # full ones, by API key

    def open(
        self, caller: Caller, headers: Mapping[bytes, bytes], *, admin: bool = False
    ) -> Record | None:
        """A request of the model came; admin: from one. Raises InvalidRequest for what the header
        asks in vain."""
        if (asked := headers.get(HEADER)) is not None:
            return self._open_full(caller, asked, admin=admin)
        if not self._count and not self._always:
            return None
        record = self._new(caller, None)
        self._light.append(record)
        return record

    def _new(self, caller: Caller, full: Full | None) -> Record:
        return Record(caller, self._model, f"{self._process}{next(self._numbers):x}", full)

    def _open_full(self, caller: Caller, asked: bytes, *, admin: bool) -> Record:
        if asked != FULL:
            raise InvalidRequest("X-Headrace-Record can be full", param="X-Headrace-Record")
        if not self._offers_full:
            raise InvalidRequest(
                "this server records no requests in full: it runs with --no-ui or --record-count 0",
                param="X-Headrace-Record",
            )
        recorded, why = "were being recorded in full", ""
        if self._filtered and not admin:
            why = "a filter changes what this server sends, and a full one would show it"
        elif caller.key and self._running[caller.key] >= MOST_FULL_A_KEY:
            why = f"{MOST_FULL_A_KEY} others of this key {recorded}"
        elif self._running.total() >= MOST_FULL:
            why = f"{MOST_FULL} others {recorded}"
        if why:
            record = self._new(caller, None)
            record.note = f"a light record: {why}"
            self._light.append(record)
            return record
        record = self._new(caller, Full())
        self._full.append(record)
        self._running[record.key] += 1
        return record

    def close(self, record: Record, status: int, error: str) -> None:
        """Its last byte leaves now, or nobody reads any more."""
        record.done(status, error)
        if record.full is not None:
            self._running[record.key] -= 1
            self._running += Counter()  # keeps no key of whom nothing runs
            self._make_room()

    def _make_room(self) -> None:
        """The newest full record always stays."""
        size_bytes = sum(record.size_bytes for record in self._full)
        while len(self._full) > 1 and (
            size_bytes > self._most_bytes or len(self._full) > self._count
        ):
            size_bytes -= self._full.popleft().size_bytes

    def newest(self, count: int, key: str) -> list[Record]:
        """Newest first; those of one API key, "" = all."""
        both = merge(
            reversed(self._light), reversed(self._full), key=lambda r: r.arrived_s, reverse=True
        )
        return list(islice((record for record in both if key in ("", record.key)), count))

    def find(self, name: str, key: str) -> Record | None:
        """The one with this name, if it is one of that API key; "" = any."""
        return next((record for record in self._all(key) if record.name == name), None)

    def meant(self, given: str, key: str) -> list[Record]:
        """Those that `given`, a name or an id, may mean, and others with the id of that name; the
        newest of each, newest first."""
        every = self._all(key)
        named = [record for record in every if record.name == given]
        of_name = (record for record in every if record.id == given.rpartition("~")[0])
        of_id = (record for record in every if record.id == given)
        found = [*named, *islice(of_name, MOST_SAME + 1), *islice(of_id, MOST_SAME + 1)]
        return sorted(
            {record.name: record for record in found}.values(), key=lambda r: -r.arrived_s
        )

    def _all(self, key: str) -> list[Record]:
        return self.newest(len(self._light) + len(self._full), key)

"""The records of all HTTP processes of a server, whichever of them is asked.

Each process holds the records of the requests that it served. It answers the others over a socket
in the server's own folder, which lets nobody else in:

    {"op": "newest" | "meant" | "find", "name": name or id, "count": number,
     "key": name of an API key}\\n                                                       ->
    the records as JSON, a space before it where that takes time, or nothing where there
    is none; then the end                                                             <-

What a name or an id stands for is asked of all first (`meant`: rows with id, key and at_s), then
the whole record of the process that has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from headrace.api.record import Record
from headrace.api.recorder import MOST_SAME, Recorder

log = logging.getLogger("headrace.api")

PATIENCE_S = 2.0  # with another process, until it says whether it has something
WHOLE_S = 60.0  # until that is here: a long record is seconds of work
FOUND = b" "  # it has: space before JSON
MOST_NAME_CHARS = 160  # of a request's id, 128 (see `edge.REQUEST_ID`), and a mark
Show = Callable[[Record], dict[str, Any]]  # a whole record; from any thread


class _Meant(msgspec.Struct, frozen=True):
    """A record that a name or an id may mean. key: its name; at_s: wall clock."""

    id: str
    key: str
    at_s: float


class Asked(msgspec.Struct, frozen=True):
    """What one process asks another. key: "" = the requests of everybody."""

    op: str
    name: str = ""
    count: int = 0
    key: str = ""


class RecordRelay:
    """folder: None = there are no other processes."""

    def __init__(self, recorder: Recorder, show: Show, worker: int, folder: Path | None) -> None:
        self._recorder, self._show, self._folder = recorder, show, folder
        self._name = f"records-{worker}.sock"
        self._server: asyncio.Server | None = None
        self._one = asyncio.Lock()  # records are made JSON one by one: tokens go before looks

    async def start(self) -> None:
        """Listen for the other processes."""
        if self._folder is not None:
            path = self._folder / self._name
            path.unlink(missing_ok=True)  # of a process that died
            self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def newest(self, count: int, key: str) -> list[dict[str, Any]]:
        """Light records of all processes, newest first."""
        asked = Asked("newest", count=count, key=key)
        found: list[dict[str, Any]] = [r.light() for r in self._recorder.newest(count, key)]
        for said in await self._ask_others(asked):
            found += msgspec.json.decode(said)
        return sorted(found, key=lambda record: -record["created_s"])[:count]

    async def find(self, given: str, key: str) -> bytes | None:
        """The whole record with this name, or the newest with this id, as JSON; and which others
        have the id."""
        if len(given) > MOST_NAME_CHARS:
            return None
        meant = self._meant(given, key)
        for said in await self._ask_others(Asked("meant", given, key=key)):
            meant += msgspec.json.decode(said, type=list[_Meant])
        meant.sort(key=lambda one: -one.at_s)
        named = [one for one in meant if one.key == given] or [o for o in meant if o.id == given]
        if not named:
            return None
        chosen = named[0]
        if (mine := self._recorder.find(chosen.key, key)) is not None:
            whole = await self._whole(mine)
        else:
            said_by = await self._ask_others(Asked("find", chosen.key, key=key))
            if not (whole := next(filter(None, said_by), b"")):
                return None  # it has left the ring
        same = [one for one in meant if one.id == chosen.id and one != chosen][:MOST_SAME]
        rows = [{"key": one.key, "at_s": one.at_s} for one in same]
        return whole.removesuffix(b"}") + b',"same_id":' + msgspec.json.encode(rows) + b"}"

    def _meant(self, given: str, key: str) -> list[_Meant]:
        found = self._recorder.meant(given, key)
        return [_Meant(record.id, record.name, record.created_s) for record in found]

    async def _whole(self, record: Record) -> bytes:
        async with self._one:
            return await asyncio.to_thread(lambda: msgspec.json.encode(self._show(record)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(msgspec.MsgspecError, ValueError, OSError):
            # Whoever asked is gone, or asked for something that is too long.
            asked = msgspec.json.decode(await reader.readline(), type=Asked)
            if asked.op == "find":
                if (record := self._recorder.find(asked.name, asked.key)) is not None:
                    writer.write(FOUND)
                    writer.write(await self._whole(record))
            elif asked.op == "meant":
                writer.write(msgspec.json.encode(self._meant(asked.name, asked.key)))
            else:
                newest = self._recorder.newest(asked.count, asked.key)
                writer.write(msgspec.json.encode([record.light() for record in newest]))
            await writer.drain()

    async def _ask_others(self, asked: Asked) -> list[bytes]:
        if self._folder is None:
            return []
        paths = [p for p in self._folder.glob("records-*.sock") if p.name != self._name]
        said = await asyncio.gather(*(_ask(path, asked) for path in paths))
        return [answer for answer in said if answer]


async def _ask(path: Path, asked: Asked) -> bytes:
    """What another process says; nothing if it is gone or busy."""
    try:
        async with asyncio.timeout(PATIENCE_S) as patience:
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(msgspec.json.encode(asked) + b"\n")
                first = await reader.read(1)
                patience.reschedule(asyncio.get_running_loop().time() + WHOLE_S)
                return (first + await reader.read()).removeprefix(FOUND)
            finally:
                writer.close()
    except (OSError, TimeoutError):  # a process that died leaves its socket
        log.debug("no answer from %s", path.name)
        return b""

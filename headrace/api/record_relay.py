"""The records of all HTTP processes of a server, whichever of them is asked.

Each process holds the records of the requests that it served. It answers the others over a socket
in the server's own folder, which lets nobody else in:

    {"op": "newest" | "meant" | "find", "name": name or id, "count": number,
     "key": name of an API key}\\n                                                       ->
    the records as JSON, a space before it where that takes time, or nothing where there
    is none; then the end                                                             <-

What a name or an id stands for is asked of all first (`meant`: rows with id, key and at_s), side by
side, then the whole record of the process that has it. Once somebody has what is asked for, the
others are waited for a moment more: one that hangs keeps no look back, and how many did not answer
is told with what was found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from headrace.api.record import Record
from headrace.api.recorder import MOST_SAME, Recorder

log = logging.getLogger("headrace.api")

PATIENCE_S = 2.0  # with another process, until it says whether it has something
REST_S = 0.5  # with the others, once what is asked for is found
WHOLE_S = 60.0  # until that is here: a long record is seconds of work
FOUND = b" "  # it has: space before JSON
MOST_NAME_CHARS = 160  # of a request's id, 128 (see `edge.REQUEST_ID`), and a mark
Show = Callable[[Record], dict[str, Any]]  # a whole record; from any thread
T = TypeVar("T")


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


class Looked(NamedTuple, Generic[T]):
    """What a look found. unanswered: other processes that live and did not answer, so that what
    they hold is missing."""

    found: T
    unanswered: int = 0


class _Heard(NamedTuple):
    """What the other processes said, each with its socket."""

    said: list[tuple[Path, bytes]]
    unanswered: int


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

    async def newest(self, count: int, key: str) -> Looked[list[dict[str, Any]]]:
        """Light records of all processes, newest first."""
        asked = Asked("newest", count=count, key=key)
        found: list[dict[str, Any]] = [r.light() for r in self._recorder.newest(count, key)]
        heard = await self._ask_others(asked, lambda said: True, found=True)
        for _, said in heard.said:
            found += msgspec.json.decode(said)
        newest = sorted(found, key=lambda record: -record["created_s"])[:count]
        return Looked(newest, heard.unanswered)

    async def find(self, given: str, key: str) -> Looked[bytes | None]:
        """The whole record with this name, or the newest with this id, as JSON; which others have
        the id, and how many processes did not say."""
        if len(given) > MOST_NAME_CHARS:
            return Looked(None)
        rows = [(one, None) for one in self._meant(given, key)]
        found = any(_means(given, one) for one, _ in rows)
        asked = Asked("meant", given, key=key)
        heard = await self._ask_others(
            asked, lambda said: any(_means(given, one) for one in _rows(said)), found=found
        )
        meant: list[tuple[_Meant, Path | None]] = [
            *rows,
            *((one, path) for path, said in heard.said for one in _rows(said)),
        ]
        meant.sort(key=lambda row: -row[0].at_s)
        named = [row for row in meant if row[0].key == given]
        named = named or [row for row in meant if row[0].id == given]
        if not named:
            return Looked(None, heard.unanswered)
        chosen, path = named[0]
        whole = await self._fetch(chosen.key, key, path)
        if not whole:  # it has left the ring, or its process does not answer any more
            return Looked(None, heard.unanswered + (whole is None))
        same = [one for one, _ in meant if one.id == chosen.id and one != chosen][:MOST_SAME]
        more = {
            "same_id": [{"key": one.key, "at_s": one.at_s} for one in same],
            "unanswered": heard.unanswered,
        }
        tail = msgspec.json.encode(more)
        return Looked(whole.removesuffix(b"}") + b"," + tail[1:], heard.unanswered)

    async def _fetch(self, name: str, key: str, path: Path | None) -> bytes | None:
        """The whole record of the process that listens there, None: of this one. b"": it has left
        the ring; None: no answer."""
        if path is not None:
            return await _ask(path, Asked("find", name, key=key))
        mine = self._recorder.find(name, key)
        return b"" if mine is None else await self._whole(mine)

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

    async def _ask_others(
        self, asked: Asked, has: Callable[[bytes], bool], *, found: bool
    ) -> _Heard:
        """All at once. found: what is asked for is here, so the others are waited for `REST_S`; as
        soon as an answer `has` it, too."""
        if self._folder is None:
            return _Heard([], 0)
        others = [p for p in self._folder.glob("records-*.sock") if p.name != self._name]
        asking = {asyncio.create_task(_ask(path, asked)): path for path in others}
        said: list[tuple[Path, bytes]] = []
        clock = asyncio.get_running_loop().time
        until_s = clock() + (REST_S if found else PATIENCE_S)
        waiting, silent = set(asking), 0
        try:
            while waiting and (left_s := until_s - clock()) > 0:
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    if answer := task.result():
                        said.append((asking[task], answer))
                        until_s = min(until_s, clock() + REST_S) if has(answer) else until_s
                    silent += answer is None
        finally:
            for task in waiting:
                task.cancel()
        return _Heard(said, silent + len(waiting))


def _rows(said: bytes) -> list[_Meant]:
    return msgspec.json.decode(said, type=list[_Meant])


def _means(given: str, one: _Meant) -> bool:
    return given in (one.key, one.id)


async def _ask(path: Path, asked: Asked) -> bytes | None:
    """What another process says; b"": it has nothing, or is gone; None: no answer."""
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
    except (ConnectionRefusedError, FileNotFoundError):  # a process that died leaves its socket
        return b""
    except (OSError, TimeoutError):
        log.debug("no answer from %s", path.name)
        return None

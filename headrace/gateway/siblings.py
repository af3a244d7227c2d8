"""The other gateway processes of this machine: each answers the rest on a socket in their folder.

What one process alone knows (its counters, its decisions, who drains) is asked of all, so that an
operator sees one gateway. The folder is its owner's alone, so no key is asked for there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Protocol

from headrace.gateway.connection import Client
from headrace.gateway.upstream import Headers

log = logging.getLogger("headrace.gateway")

LIMIT_S = 2.0  # a process that takes longer is left out
_HEAD = (
    "{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n"
)


class Answering(Protocol):
    """Who gets an answer of the gateway's own."""

    def answer(self, status: int, headers: Headers, body: bytes) -> None: ...


class Kept:
    """Keeps it."""

    status = 0
    headers: Headers
    body = b""

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """See `Answering`."""
        self.status, self.headers, self.body = status, headers, body


class Gathering:
    """A client's `Serving` while other processes are asked."""

    def __init__(self, client: Client, work: Coroutine[None, None, None]) -> None:
        self._client = client
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what other processes said is lost", exc_info=error)
            self._client.abort()

    def client_gone(self) -> None:
        """Nobody listens."""
        self._task.cancel()

    def client_slow(self, slow: bool) -> None:
        """One whole answer is written, and that is all."""


class Siblings:
    """`processes` of them, of which this one is `own`."""

    def __init__(self, folder: Path, processes: int, own: int) -> None:
        self._folder, self.own = folder, own
        self._others = [i for i in range(processes) if i != own]

    @property
    def path(self) -> Path:
        """Where this one listens."""
        return self._at(self.own)

    def _at(self, index: int) -> Path:
        return self._folder / f"{index}.sock"

    async def ask(self, method: str, target: str, body: bytes = b"") -> list[tuple[int, bytes]]:
        """Status and body of each that answers."""
        said = await asyncio.gather(
            *(self._one(index, method, target, body) for index in self._others)
        )
        return [answer for answer in said if answer is not None]

    async def _one(
        self, index: int, method: str, target: str, body: bytes
    ) -> tuple[int, bytes] | None:
        try:
            async with asyncio.timeout(LIMIT_S):
                reader, writer = await asyncio.open_unix_connection(str(self._at(index)))
                try:
                    head = _HEAD.format(method=method, target=target, size=len(body))
                    writer.write(head.encode() + body)
                    answer = await reader.read(-1)
                finally:
                    writer.close()
        except OSError:  # TimeoutError is one
            return None
        first, _, rest = answer.partition(b"\r\n")
        parts = first.split()
        if len(parts) < 2:
            return None
        return int(parts[1]), rest.partition(b"\r\n\r\n")[2]

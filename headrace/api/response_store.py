"""Responses that are kept: bounded in number, bytes and age, and shared by all HTTP processes.

One SQLite file in the server's own folder. It goes with the server: nothing is kept over a restart.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

FILE = "responses.db"
BUSY_S = 10.0  # another process writes; no write takes long
T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, made_s REAL, bytes INTEGER, body BLOB, input BLOB, context BLOB
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_age ON responses (made_s, bytes);
"""


class Kept(msgspec.Struct, frozen=True):
    """One response, each member as JSON: the object, the items that its request brought, and all
    items of the conversation up to its end."""

    body: bytes
    input: bytes
    context: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.input) + len(self.context)


class ResponseStore:
    """`start` before use, `close` after. Everything runs in one thread of its own, so that a
    process that waits for another's write holds up no stream.
    """

    def __init__(self, folder: Path | None, count: int, max_bytes: int, ttl_s: float) -> None:
        """folder: None keeps them in this process alone. count: 0 keeps none."""
        self._path = ":memory:" if folder is None else str(folder / FILE)
        self._count, self._max_bytes, self._ttl_s = count, max_bytes, ttl_s
        self._thread: ThreadPoolExecutor | None = None
        self._db: sqlite3.Connection | None = None

    @property
    def enabled(self) -> bool:
        """Responses are kept at all."""
        return self._count > 0

    async def start(self) -> None:
        """Open the file."""
        self._thread = ThreadPoolExecutor(1, "responses")

        def connect() -> sqlite3.Connection:
            db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")  # it need not outlive this machine's power
            db.executescript(_SCHEMA)
            return db

        if self.enabled:
            self._db = await asyncio.get_running_loop().run_in_executor(self._thread, connect)

    async def close(self) -> None:
        """Close it."""
        assert self._thread is not None, "close() before start()"
        if self._db is not None:
            await self._run(lambda db: db.close())
        self._thread.shutdown()

    async def put(self, name: str, kept: Kept) -> bool:
        """Keep one; the oldest make room. False if it alone is more than the store may hold."""
        size = kept.size_bytes
        if not self.enabled or size > self._max_bytes:
            return False

        def write(db: sqlite3.Connection) -> None:
            now_s = time.time()
            row = (name, now_s, size, kept.body, kept.input, kept.context)
            db.execute("BEGIN IMMEDIATE")
            try:
                db.execute("DELETE FROM responses WHERE made_s < ?", (now_s - self._ttl_s,))
                db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
                self._evict(db)
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

        await self._run(write)
        return True

    def _evict(self, db: sqlite3.Connection) -> None:
        """The oldest go until both bounds hold."""
        count, size = db.execute("SELECT count(*), total(bytes) FROM responses").fetchone()
        oldest = "SELECT id, bytes FROM responses ORDER BY made_s"
        gone = []
        for name, its_bytes in db.execute(oldest):
            if count <= self._count and size <= self._max_bytes:
                break
            gone.append((name,))
            count, size = count - 1, size - its_bytes
        db.executemany("DELETE FROM responses WHERE id = ?", gone)

    async def get(self, name: str) -> Kept | None:
        """One that is kept and not too old."""
        query = "SELECT body, input, context FROM responses WHERE id = ? AND made_s >= ?"

        def read(db: sqlite3.Connection) -> Kept | None:
            row = db.execute(query, (name, time.time() - self._ttl_s)).fetchone()
            return Kept(*row) if row else None

        return await self._run(read) if self.enabled else None

    async def delete(self, name: str) -> bool:
        """Forget one; False if it was not kept."""
        query = "DELETE FROM responses WHERE id = ? AND made_s >= ?"

        def remove(db: sqlite3.Connection) -> bool:
            return db.execute(query, (name, time.time() - self._ttl_s)).rowcount > 0

        return await self._run(remove) if self.enabled else False

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        assert self._thread is not None, "use after start()"
        assert self._db is not None, "use after start(), and where responses are kept"
        db = self._db
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(db))

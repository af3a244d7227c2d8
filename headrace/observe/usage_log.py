"""The usage log: a file of lines that several processes append to, and that survives their death.

`append` hands a line to the system in one write, before it returns: no death of a process takes it
away after that, however sudden. Against the death of the machine, a thread calls fsync, at most
`fsync_s` seconds after a line was written and once for all lines that came meanwhile; who needs it
waits in `synced`.

The file may be moved away at any time: the next line goes into a new one of the same name. A
process that is killed within a write may leave half a line; whoever writes next begins a new one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("headrace.usage")

_MODE = 0o640
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class UsageLog:
    """One process's way to the file at `path`. `append` and `synced` belong to one thread.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path, fsync_s: float) -> None:
        self._path, self._fsync_s = path, fsync_s
        self._open()
        self._lines = 0  # appended so far
        self._changed = threading.Condition()  # guards what follows
        self._synced = 0  # of these, on the disk
        self._retired: list[int] = []  # files moved away, with lines that may not be
        self._error: OSError | None = None  # fsync failed: nothing can be promised any more
        self._closed = False
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> int:
        """Write a line (without its end); returns its number for `synced`. Raises OSError, and then
        the file does not hold it whole: a line that only lacks its end is whole."""
        self._follow()
        data = (b"" if self._whole() else b"\n") + line + b"\n"
        written = os.write(self._fd, data)
        if written < len(data) - 1:
            raise OSError(f"{written} of {len(data)} bytes were written")
        with self._changed:
            self._lines += 1
            self._changed.notify_all()
        return self._lines

    async def synced(self, number: int) -> None:
        """Wait until line `number` is on the disk. Raises OSError if fsync failed."""
        with self._changed:
            if self._error is not None:
                raise OSError(*self._error.args)
            if self._synced >= number:
                return
            future = asyncio.get_running_loop().create_future()
            self._waiters.append((number, future))
        await future

    @property
    def broken(self) -> bool:
        """fsync failed once: `synced` will not succeed any more."""
        return self._error is not None

    def close(self) -> None:
        """The last fsync, then the end of the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        os.close(self._fd)

    def _open(self) -> None:
        self._fd = os.open(self._path, _FLAGS, _MODE)
        self._inode = os.fstat(self._fd).st_ino

    def _follow(self) -> None:
        """Open the file anew if it was moved away."""
        with suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:
                return
        old = self._fd
        self._open()
        with self._changed:
            self._retired.append(old)
            self._changed.notify_all()

    def _whole(self) -> bool:
        """The file is empty or ends with a line's end. A line that another process is writing at
        this moment may look like a half one: then an empty line comes between."""
        size = os.fstat(self._fd).st_size
        return size == 0 or os.pread(self._fd, 1, size - 1) == b"\n"

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._synced == self._lines and not self._retired and not self._closed:
                    self._changed.wait()
                if self._fsync_s and not self._closed:
                    self._changed.wait_for(lambda: self._closed, self._fsync_s)
                number, closed = self._lines, self._closed
                retired, self._retired = self._retired, []
                descriptor = os.dup(self._fd)
            try:
                for one in (*retired, descriptor):
                    os.fsync(one)
                error = None
            except OSError as caught:
                error = caught
                log.error("fsync of %s: %s", self._path, caught)
            for one in (*retired, descriptor):
                os.close(one)
            self._tell(number, error)
            if closed:
                return

    def _tell(self, number: int, error: OSError | None) -> None:
        with self._changed:
            self._synced, self._error = number, error or self._error
            ready = [future for upto, future in self._waiters if upto <= number]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > number]
        for future in ready:
            with suppress(RuntimeError):  # its loop is closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(_settle, future, error)


def _settle(future: asyncio.Future[None], error: OSError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(OSError(*error.args))

"""Child processes: they end with their parent, and those that take too long are killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(number: int, parent: int | None = None) -> None:
    """Call in a child: `number` is sent to it when the thread that started it ends, however.

    On Linux; elsewhere it does nothing. A child whose `parent` (a process id) has gone already
    ends at once.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        raise SystemExit(1)


class LineProcess:
    """`python -m module`, which answers each line of its input with a line. One caller at a time.

    first: a line that gets no answer, such as what it has to know.
    """

    def __init__(self, module: str, first: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None, "the child's pipes"
        self._process.stdin.write(first + b"\n")

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    def ask(self, line: bytes, limit_s: float) -> bytes:
        """The answer to a line. Raises TimeoutError, or ConnectionError if the child ended."""
        process = self._process
        assert process.stdin is not None, "the child's pipes"
        process.stdin.write(line + b"\n")
        process.stdin.flush()
        return self._read(time.monotonic() + limit_s)

    def _read(self, deadline_s: float) -> bytes:
        out = self._process.stdout
        assert out is not None, "the child's pipes"
        pieces: list[bytes] = []
        while not (pieces and pieces[-1].endswith(b"\n")):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([out], [], [], left_s)[0]:
                raise TimeoutError("no answer in time")
            pieces.append(os.read(out.fileno(), 65536))
            if not pieces[-1]:
                raise ConnectionError("the child ended")
        return b"".join(pieces)[:-1]

    def kill(self) -> None:
        """From any thread; `ask` then raises."""
        self._process.kill()

    def end(self) -> None:
        """Kill it, wait, close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of a line that it never read
                    pipe.close()

"""Child processes: they end with their parent, those that take too long are killed, and those that
keep dying are started again ever later."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Any

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
LASTED_S = 60.0  # one that was up for so long did not die of its start
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
SPAWN = mp.get_context("spawn")
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


def start_child(name: str, entry: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that runs `entry(*args)`: it leads a group of its own (Ctrl-C reaches the parent
    alone) and dies with the parent. name: what ps and top show, of 15 bytes at most."""
    process = SPAWN.Process(
        target=_first_in_child,
        args=(os.getpid(), name, entry, *args),
        name=name,
        daemon=True,  # should the parent's end be cut short, it ends this instead of waiting for it
    )
    process.start()
    return process


def _first_in_child(parent: int, name: str, entry: Callable[..., None], *args: Any) -> None:
    os.setpgrp()
    die_with_parent(signal.SIGKILL, parent)
    if _libc is not None:
        _libc.prctl(PR_SET_NAME, name.encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    entry(*args)


def end_children(
    processes: Iterable[BaseProcess], patience_s: float, *, told: bool = False
) -> None:
    """SIGTERM, unless they were `told`; whoever is still there after so long is killed."""
    processes = list(processes)
    for process in processes:
        if not told:
            process.terminate()
    deadline_s = time.monotonic() + patience_s
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def how_it_ended(process: BaseProcess) -> str:
    """In words; collects it."""
    process.join()
    code = process.exitcode
    return f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"


def on_stop(handler: Callable[[int, object], None]) -> int:
    """SIGTERM and SIGINT call `handler`; the descriptor becomes readable with each."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    return wake_read


class Pauses:
    """Before a process that died is started again: none after one that lasted, then twice as long
    each time, to a limit."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def after(self, lasted_s: float) -> float:
        """Seconds until the next start. lasted_s: how long it was up, 0 = it never was."""
        pause_s = 0.0 if lasted_s >= LASTED_S else self._next_s
        self._next_s = min(max(2 * pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
        return pause_s


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

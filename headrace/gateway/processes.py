"""Several gateway processes behind one port: started, watched, started again, stopped together.

Each listens on a socket of its own with SO_REUSEPORT, so the kernel parts connections among them;
the parent holds the port, serves nobody, and ends them. They share the workers' load through a
`Board`, limits through the `Ledger`, and what operators ask through `Siblings`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from headrace.children import die_with_parent
from headrace.errors import ConfigError
from headrace.gateway.board import Board

log = logging.getLogger("headrace.gateway")

AGAIN_S = 1.0  # until a process that died is started again
KILL_AFTER_S = 5.0
EXIT_SETUP = 2
_spawn = mp.get_context("spawn")
Entry = Callable[[Path, int, int, Connection], None]  # folder, own index, port, says when it is up


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A bound socket; shared: others of this user may bind the port too. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"{host}:{port}: {error}", param="port") from None
    return sock


def _child(parent: int, entry: Entry, *args: Any) -> None:
    os.setpgrp()
    die_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    entry(*args)


class Processes:
    """`run()` blocks until SIGTERM or SIGINT and returns the exit code."""

    def __init__(
        self,
        host: str,
        port: int,
        count: int,
        shutdown_s: float,
        entry: Entry,
        said: Callable[[int], None],
    ) -> None:
        """said: called once with the port when all of them listen."""
        with listen(host, port, shared=False) as probe:  # no other gateway shares it by mistake
            self._port = int(probe.getsockname()[1])
        self._sock = listen(host, self._port, shared=True)  # never listens: it holds the port
        self._count, self._shutdown_s, self._entry, self._said = count, shutdown_s, entry, said
        self._children: list[mp.process.BaseProcess] = []
        self._pipes: dict[Connection, int] = {}
        self._up: set[int] = set()
        self._stops = 0

    def run(self) -> int:
        """Start them and watch."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-gateway-"))  # mkdtemp makes it 0700
        try:
            board = self._folder / "board"
            Board.create(board, self._count)
            self._board = Board(board, self._count, 0)
            self._children = [self._start(i) for i in range(self._count)]
            return self._watch(wake_read)
        finally:
            self._end()
            self._sock.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stops += 1
        for child in self._children:
            child.terminate()

    def _start(self, index: int) -> mp.process.BaseProcess:
        ours, theirs = _spawn.Pipe(duplex=False)
        process = _spawn.Process(
            target=_child,
            args=(os.getpid(), self._entry, self._folder, index, self._port, theirs),
            name=f"headrace-gateway-{index}",
            daemon=True,
        )
        process.start()
        theirs.close()
        self._pipes[ours] = index
        return process

    def _watch(self, wake: int) -> int:
        while not self._stops:
            sentinels = {child.sentinel: i for i, child in enumerate(self._children)}
            ready = set(wait([*self._pipes, *sentinels, wake]))
            for pipe in [pipe for pipe in self._pipes if pipe in ready]:
                self._hear(pipe)
            ended = [index for sentinel, index in sentinels.items() if sentinel in ready]
            if not all(self._ended(index) for index in ended):
                return EXIT_SETUP
        return 0

    def _hear(self, pipe: Connection) -> None:
        index = self._pipes.pop(pipe)
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
            self._up.add(index)
            if len(self._up) == self._count:
                self._said(self._port)
        pipe.close()

    def _ended(self, index: int) -> bool:
        """A process ended on its own: another takes its place. False if it never began."""
        if self._stops:
            return True
        child = self._children[index]
        child.join()
        if index not in self._up:
            log.error("gateway process %d did not start", index)
            return False
        log.error("gateway process %d died (%s); starting it again", index, child.exitcode)
        self._board.clear(index)
        time.sleep(AGAIN_S)
        self._children[index] = self._start(index)
        return True

    def _end(self) -> None:
        if not self._stops:  # else they know already, and a second time would cut their requests
            for child in self._children:
                child.terminate()
        deadline_s = time.monotonic() + self._shutdown_s + KILL_AFTER_S
        for child in self._children:
            child.join(max(0.0, deadline_s - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join()
        self._board.close()

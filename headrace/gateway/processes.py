"""Several gateway processes behind one port: started, watched, started again, stopped together.

Each listens on a socket of its own with SO_REUSEPORT, so the kernel parts connections among them;
the parent holds the port, serves nobody, and ends them. They share the workers' load through a
`Board`, limits through the `Ledger`, and what operators ask through `Siblings`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from headrace.children import SPAWN, Pauses, end_children, how_it_ended, on_stop, start_child
from headrace.errors import ConfigError
from headrace.gateway.board import Board
from headrace.runtime_folder import runtime_folder

log = logging.getLogger("headrace.gateway")

KILL_AFTER_S = 5.0
EXIT_SETUP = 2
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
        self._children: dict[int, BaseProcess] = {}
        self._pipes: dict[Connection, int] = {}
        self._ever_up: set[int] = set()
        self._up_s: dict[int, float] = {}  # time.monotonic() since which it is
        self._pauses = [Pauses() for _ in range(count)]
        self._again_s: dict[int, float] = {}  # those that are to be started then
        self._stops = 0

    def run(self) -> int:
        """Start them and watch."""
        wake = on_stop(self._on_signal)
        with runtime_folder("gateway-") as self._folder:
            board = self._folder / "board"
            Board.create(board, self._count)
            self._board = Board(board, self._count, 0)
            try:
                for index in range(self._count):
                    self._start(index)
                return self._watch(wake)
            finally:
                # Those that were told know it: a second time would cut their requests.
                patience_s = self._shutdown_s + KILL_AFTER_S
                end_children(self._children.values(), patience_s, told=self._stops > 0)
                self._board.close()
                self._sock.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self._stops += 1
        for child in list(self._children.values()):
            child.terminate()

    def _start(self, index: int) -> None:
        ours, theirs = SPAWN.Pipe(duplex=False)
        args = (self._folder, index, self._port, theirs)
        self._children[index] = start_child(f"headrace-gateway-{index}", self._entry, *args)
        if self._stops:  # the signal came before it was in the list
            self._children[index].terminate()
        theirs.close()
        self._pipes[ours] = index

    def _watch(self, wake: int) -> int:
        while not self._stops:
            sentinels = {child.sentinel: i for i, child in self._children.items()}
            next_s = min(self._again_s.values(), default=None)
            limit_s = None if next_s is None else max(0.0, next_s - time.monotonic())
            ready = set(wait([*self._pipes, *sentinels, wake], timeout=limit_s))
            for pipe in [pipe for pipe in self._pipes if pipe in ready]:
                self._hear(pipe)
            ended = [index for sentinel, index in sentinels.items() if sentinel in ready]
            if not all(self._ended(index) for index in ended):
                return EXIT_SETUP
            for index in [i for i, at_s in self._again_s.items() if at_s <= time.monotonic()]:
                del self._again_s[index]
                self._start(index)
        return 0

    def _hear(self, pipe: Connection) -> None:
        index = self._pipes.pop(pipe)
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
            self._up_s[index] = time.monotonic()
            if index not in self._ever_up:
                self._ever_up.add(index)
                if len(self._ever_up) == self._count:
                    self._said(self._port)
        pipe.close()

    def _ended(self, index: int) -> bool:
        """A process ended on its own: another takes its place. False if it never began."""
        if self._stops:
            return True
        how = how_it_ended(self._children.pop(index))
        if index not in self._ever_up:
            log.error("gateway process %d did not start (%s)", index, how)
            return False
        now_s = time.monotonic()
        pause_s = self._pauses[index].after(now_s - self._up_s.pop(index, now_s))
        log.error("gateway process %d died (%s); starting it again in %g s", index, how, pause_s)
        self._board.clear(index)
        self._again_s[index] = now_s + pause_s
        return True

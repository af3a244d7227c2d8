"""Checker: whether a grammar can be honoured, found out in processes that can be killed."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from headrace.errors import InvalidRequest, QueueFull
from headrace.grammar.limits import CHECK_S
from headrace.messages import Grammar

PROCESSES = 2
WAITING = 64  # checks that may wait
VERDICTS = 4096  # kept, 64 bytes each


class Checker:
    """Safe from several threads. Starts its processes when the first grammar comes.

    special: the names of the tokenizer's special tokens, which a Lark grammar may use.
    """

    def __init__(self, special: Sequence[str] = (), limit_s: float = CHECK_S) -> None:
        self._special = list(special)
        self._limit_s = limit_s
        self._pool = ThreadPoolExecutor(PROCESSES, "grammar check")
        self._lock = threading.Lock()
        self._waiting = 0
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._here = threading.local()  # .process: each thread of the pool has its own
        self._processes: set[subprocess.Popen[bytes]] = set()

    def submit(self, grammar: Grammar, param: str) -> Future[None]:
        """The future raises InvalidRequest, with `param`, for what cannot be honoured.

        Raises QueueFull when too many checks wait.
        """
        key = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode()).digest()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
            elif self._waiting >= WAITING:
                raise QueueFull(f"{WAITING} grammars wait to be checked")
            else:
                self._waiting += 1
        if known is None:
            return self._pool.submit(self._check, key, grammar, param)
        done: Future[None] = Future()
        try:
            _judge(known, param)
        except InvalidRequest as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def close(self) -> None:
        """End the processes; what still waits fails."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            process.kill()

    def _check(self, key: bytes, grammar: Grammar, param: str) -> None:
        try:
            message = self._ask(grammar)
        finally:
            with self._lock:
                self._waiting -= 1
        with self._lock:
            self._known[key] = message
            while len(self._known) > VERDICTS:
                self._known.popitem(last=False)
        _judge(message, param)

    def _ask(self, grammar: Grammar) -> str:
        process = self._process()
        assert process.stdin is not None, "the checker's pipes"
        try:
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            process.stdin.flush()
            reply = self._read(process)
        except BrokenPipeError:
            reply = b""
        if reply.endswith(b"\n"):
            return msgspec.json.decode(reply, type=str)
        late = process.poll() is None
        self._end(process)
        why = f"over {self._limit_s:g} s" if late else "too much memory or depth"
        return f"the grammar is too complex: it takes {why} to compile"

    def _read(self, process: subprocess.Popen[bytes]) -> bytes:
        """A line; less when its time is up, or when the process ended."""
        assert process.stdout is not None, "the checker's pipes"
        deadline_s, got = time.monotonic() + self._limit_s, b""
        while not got.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                return got
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                process.wait()
                return got
            got += piece
        return got

    def _process(self) -> subprocess.Popen[bytes]:
        """This thread's process, which has said that it is ready."""
        process: subprocess.Popen[bytes] | None = getattr(self._here, "process", None)
        if process is not None and process.poll() is None:
            return process
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.grammar.checker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._here.process = process
        self._processes.add(process)
        assert process.stdin is not None, "the checker's pipes"
        process.stdin.write(msgspec.json.encode((os.getpid(), self._special)) + b"\n")
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._processes.discard(process)
        self._here.process = None


def _judge(message: str, param: str) -> None:
    if message:
        raise InvalidRequest(f"{param}: {message}", param=param)

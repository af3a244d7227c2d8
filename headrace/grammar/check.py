"""Checker: whether a grammar can be honoured, found out in processes that can be killed."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from headrace.children import LineProcess
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

    def __init__(self, special: Sequence[str] = ()) -> None:
        self._special = list(special)
        self._pool = ThreadPoolExecutor(PROCESSES, "grammar check")
        self._lock = threading.Lock()
        self._waiting = 0
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._here = threading.local()  # .process: each thread of the pool has its own
        self._processes: set[LineProcess] = set()

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
        self._pool.shutdown(wait=True)  # whoever asks a killed one hears at once
        for process in self._processes:
            process.end()

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
        try:
            answer = process.ask(msgspec.json.encode(grammar), CHECK_S)
            return msgspec.json.decode(answer, type=str)
        except TimeoutError:
            why = f"over {CHECK_S:g} s"
        except ConnectionError:
            why = "too much memory or depth"
        process.end()
        self._processes.discard(process)
        self._here.process = None
        return f"the grammar is too complex: it takes {why} to compile"

    def _process(self) -> LineProcess:
        """This thread's process."""
        process: LineProcess | None = getattr(self._here, "process", None)
        if process is None or not process.alive:
            facts = msgspec.json.encode((os.getpid(), self._special))
            process = LineProcess("headrace.grammar.checker", facts)
            self._here.process = process
            self._processes.add(process)
        return process


def _judge(message: str, param: str) -> None:
    if message:
        raise InvalidRequest(f"{param}: {message}", param=param)

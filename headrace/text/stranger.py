"""Strangers: templates that come with a request, rendered in a process that can be killed.

What a template does inside of one call of a filter has no other limit than that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

import msgspec

from headrace.children import LineProcess
from headrace.errors import InvalidRequest, QueueFull
from headrace.text.conversation import Asked

LIMIT_S = 5.0  # wall clock of one; the template's own limit comes first, if it can
START_S = 60.0
WAITING = 8  # that may wait for the process


class Order(msgspec.Struct, frozen=True):
    """What the process is asked."""

    template: str
    special_tokens: dict[str, str]
    asked: Asked


_FIRST = msgspec.json.encode(Order("", {}, Asked([])))


class Reply(msgspec.Struct, frozen=True):
    """What it answers: a prompt, or why not and the field at fault."""

    text: str = ""
    error: str = ""
    param: str | None = None


class Strangers:
    """Safe from several threads. Starts its process when the first template comes."""

    def __init__(self, special_tokens: Mapping[str, str], limit_s: float = LIMIT_S) -> None:
        self._special_tokens = dict(special_tokens)
        self._limit_s = limit_s
        self._free = threading.BoundedSemaphore(WAITING)
        self._turn = threading.Lock()
        self._process: LineProcess | None = None

    def prompt(self, template: str, asked: Asked) -> str:
        """The prompt. Blocks. Raises InvalidRequest; QueueFull when too many wait."""
        if not self._free.acquire(blocking=False):
            raise QueueFull(f"{WAITING} chat templates of requests wait to be rendered")
        try:
            with self._turn:
                reply = self._ask(Order(template, self._special_tokens, asked))
        finally:
            self._free.release()
        if reply.error:
            raise InvalidRequest(reply.error, param=reply.param)
        return reply.text

    def close(self) -> None:
        """End the process."""
        with self._turn:
            self._end()

    def _ask(self, order: Order) -> Reply:
        try:
            if self._process is None or not self._process.alive:
                self._end()
                parent = msgspec.json.encode(os.getpid())
                self._process = LineProcess("headrace.text.template_child", parent)
                self._process.ask(_FIRST, START_S)  # its imports are not the stranger's time
            answer = self._process.ask(msgspec.json.encode(order), self._limit_s)
            return msgspec.json.decode(answer, type=Reply)
        except TimeoutError:
            why = f"longer than {self._limit_s:g} s"
        except ConnectionError:
            why = "too much memory"
        self._end()
        return Reply(error=f"chat_template: it takes {why} to render", param="chat_template")

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

"""Log lines, and lines for people: one message, one line."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys

import pytest

from headrace.observe.logs import OneLine


def shown(message: str, *args: object, **more: object) -> str:
    record = logging.LogRecord("headrace.x", logging.INFO, __file__, 1, message, args, None)
    record.__dict__.update(more)
    return OneLine("%(levelname).1s %(name)s: %(message)s").format(record)


def test_what_others_made_up_begins_no_line() -> None:
    assert shown("worker %s is up: %s", "é 漢", "m") == "I headrace.x: worker é 漢 is up: m"
    forged = shown("up: %s", "m\r\n2026 I headrace.x: all is well\x1b[2K\u2028\x00")
    assert forged == (r"I headrace.x: up: m\r\n2026 I headrace.x: all is well\x1b[2K\u2028\x00")


def test_tracebacks_keep_their_lines() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        told = shown("lost: %s", error, exc_info=(ValueError, error, error.__traceback__))
    first, *rest = told.splitlines()
    assert first == r"I headrace.x: lost: a\nb"
    assert rest[0].startswith("Traceback")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_for_people_is_one_write(unbuffered: str) -> None:
    """Lines of other processes may come before it or after it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    code = "from headrace.observe.logs import print_line; print_line('ready'); print_line('go')"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with ours:
        with theirs:
            subprocess.run(
                [sys.executable, "-c", code], stderr=theirs.fileno(), env=environment, check=True
            )
        assert [ours.recv(100) for _ in range(3)] == [b"ready\n", b"go\n", b""]

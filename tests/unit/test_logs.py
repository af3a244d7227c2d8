"""Log lines: one message, one line."""

from __future__ import annotations

import logging

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

"""Seats: a limit of requests that holds over processes."""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path

import pytest

from headrace.api.seats import Seats
from headrace.errors import TooManyStreams


def test_as_many_as_there_are() -> None:
    seats = Seats(2)
    seats.take()
    seats.take()
    for _ in range(3):
        with pytest.raises(TooManyStreams, match="2 requests"):
            seats.take()
    seats.leave()
    seats.take()


def test_no_limit() -> None:
    seats = Seats(0)
    for _ in range(10_000):
        seats.take()
    seats.leave()


def test_workers_share_them(tmp_path: Path) -> None:
    file = tmp_path / "seats"
    one, two = Seats(2, file, 0), Seats(2, file, 1)
    one.take()
    two.take()
    for seats in (one, two):
        with pytest.raises(TooManyStreams):
            seats.take()
    one.leave()
    two.take()


def test_a_process_that_starts_again_frees_the_seats_of_its_last_life(tmp_path: Path) -> None:
    file = tmp_path / "seats"
    other, dead = Seats(3, file, 0), Seats(3, file, 1)
    other.take()
    dead.take()
    dead.take()
    again = Seats(3, file, 1)
    again.take()
    again.take()
    with pytest.raises(TooManyStreams):
        other.take()


def fill(file: Path, worker: int, start: object, out: object) -> None:
    seats, taken = Seats(40, file, worker), 0
    start.wait()  # type: ignore[attr-defined]
    for _ in range(30):
        with contextlib.suppress(TooManyStreams):
            seats.take()
            taken += 1
    out.put(taken)  # type: ignore[attr-defined]


def test_the_limit_is_never_exceeded_by_processes_that_race(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, out = context.Barrier(3), context.SimpleQueue()
    processes = [
        context.Process(target=fill, args=(tmp_path / "seats", worker, start, out))
        for worker in range(3)
    ]
    for process in processes:
        process.start()
    taken = [out.get() for _ in processes]
    for process in processes:
        process.join()
    assert 30 <= sum(taken) <= 40

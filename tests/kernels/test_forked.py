"""Work in children: each job once, failures passed over, nobody left behind."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.kernels import forked
from headrace.kernels.forked import run_forked


def mark(folder: Path, i: int) -> bool:
    with (folder / str(i)).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return i % 3 == 0


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """No child is left that was not there before; other tests of this process may have some."""
    before = children()
    yield
    left = children() - before
    for child in left:
        os.kill(child, signal.SIGKILL)
    assert not left


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("workers", [1, 3, 50])
def test_each_job_once_in_a_child(workers: int, tmp_path: Path) -> None:
    said = run_forked([functools.partial(mark, tmp_path, i) for i in range(20)], workers)
    assert said == 7
    makers = [(tmp_path / str(i)).read_text().split() for i in range(20)]
    assert all(len(lines) == 1 for lines in makers)
    assert str(os.getpid()) not in {line for lines in makers for line in lines}


def test_what_fails_is_passed_over(tmp_path: Path) -> None:
    def fails() -> bool:
        raise OSError("no room")

    def dies() -> bool:
        os._exit(3)

    jobs: list[Callable[[], bool]] = [
        fails,
        dies,
        *(functools.partial(mark, tmp_path, i) for i in range(6)),
    ]
    assert run_forked(jobs, 2) == 2
    assert len(list(tmp_path.iterdir())) == 6


class Loop:
    """Garbage that only a collector frees, as a graph of a device may be."""

    def __init__(self, freed: Path) -> None:
        self.itself, self._freed, self._born = self, freed, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self._born:
            self._freed.touch()


def test_a_child_frees_nothing_of_its_parent(tmp_path: Path) -> None:
    def collects() -> bool:
        return gc.collect() >= 0

    gc.disable()
    try:
        Loop(tmp_path / "freed")
        assert run_forked([collects] * 2, 2) == 2
    finally:
        gc.enable()
    assert not (tmp_path / "freed").exists()


_at_forks: list[Callable[[], object]] = []  # before one, and in the child; none between tests
os.register_at_fork(before=lambda: [at() for at in _at_forks[:1]])
os.register_at_fork(after_in_child=lambda: [at() for at in _at_forks[1:]])


def test_a_child_frees_nothing_while_it_begins(tmp_path: Path) -> None:
    """Others' code runs in it before ours."""
    assert gc.isenabled()
    many = 10 * gc.get_threshold()[0]
    _at_forks[:] = [lambda: Loop(tmp_path / "freed"), lambda: [[] for _ in range(many)]]
    try:
        assert run_forked([gc.isenabled], 1) == 1, "what it leaves itself is collected"
    finally:
        _at_forks.clear()
    assert gc.isenabled()
    assert not (tmp_path / "freed").exists()


def hangs() -> bool:
    signal.pause()
    return True


def test_a_stop_of_the_parent_ends_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SIGTERM does while a model loads."""

    def stops(_seconds: float) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("time.sleep", stops)
    with pytest.raises(SystemExit):
        run_forked([hangs] * 4, 2)


PARENT = """
import os, signal, sys
from headrace.kernels.forked import run_forked

def says() -> bool:
    print(os.getpid(), flush=True)
    signal.pause()

run_forked([says], 1)
"""


def test_a_child_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        try:
            child.wait(30)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_processes_that_cannot_begin_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fork, left = os.fork, [1]

    def few() -> int:
        if not left:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        left.pop()
        return fork()

    monkeypatch.setattr(os, "fork", few)
    jobs = [functools.partial(mark, tmp_path, i) for i in range(6)]
    assert run_forked(jobs, 3) == 2, "one did all of it"
    assert run_forked(jobs, 3) == 0, "nobody did"
    assert "1 processes compile, not 3: [Errno 11] no more processes" in caplog.text
    assert gc.isenabled()


def test_who_ignores_its_children_gets_their_work(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_forked([functools.partial(mark, tmp_path, i) for i in range(6)], 2) == 2
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_LONGEST_S", 0.1)
    assert run_forked([hangs], 1) == 0

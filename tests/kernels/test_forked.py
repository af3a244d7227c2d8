"""Work in children: each job once, failures passed over, nobody left behind."""

from __future__ import annotations

import functools
import gc
import os
import signal
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
    assert children() <= before


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


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs() -> bool:
        signal.pause()
        return True

    monkeypatch.setattr(forked, "_LONGEST_S", 0.1)
    assert run_forked([hangs], 1) == 0

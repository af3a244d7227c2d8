"""Processes and folders that a server leaves to nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.children import FIRST_PAUSE_S, LAST_PAUSE_S, LASTED_S, Pauses
from headrace.runtime_folder import remove_dead, runtime_folder

OWNER = """
import sys
from headrace.runtime_folder import runtime_folder
with runtime_folder("x-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, here and in child processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_pauses_grow_and_end_when_one_lasted() -> None:
    pauses = Pauses()
    made = [pauses.after(0.0) for _ in range(9)]
    assert made[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert made == sorted(made)
    assert made[-1] == LAST_PAUSE_S
    assert pauses.after(LASTED_S) == 0.0
    assert pauses.after(LASTED_S / 2) == FIRST_PAUSE_S


def test_a_folder_goes_with_its_owner(place: Path) -> None:
    with runtime_folder("x-") as folder:
        assert folder.parent == place
        assert folder.name.startswith("headrace-x-")
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "metrics").mkdir()
        remove_dead()
        assert folder.exists(), "its owner lives, if in this very process"
    assert not folder.exists()


@pytest.mark.parametrize("killed", [False, True])
def test_a_folder_of_a_killed_owner_goes_with_the_next_start(place: Path, killed: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.parent == place
        with runtime_folder():
            assert folder.exists(), "it is in use"
        if killed:
            owner.kill()
        else:
            owner.communicate("")
        owner.wait()
        assert folder.exists() == killed
        with runtime_folder() as next_one:
            assert [*place.iterdir()] == [next_one]


def test_what_is_not_a_dead_servers_stays(place: Path) -> None:
    (place / "headrace-new").mkdir()  # being made: nobody holds a lock in it yet
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "alive").touch()
    (place / "headrace-link").symlink_to(elsewhere)
    (place / "headrace-locked").mkdir()
    (place / "headrace-locked" / "alive").symlink_to(elsewhere / "alive")
    (place / "headrace-file").touch()
    before = sorted(place.rglob("*"))
    remove_dead()
    assert sorted(place.rglob("*")) == before
    dead = place / "headrace-dead"
    dead.mkdir()
    (dead / "alive").touch()
    remove_dead()
    assert sorted(place.rglob("*")) == before
    assert os.listdir(elsewhere) == ["alive"]

"""The usage log: lines that are there once `append` has returned, whoever dies or moves files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.observe.usage_log import UsageLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[UsageLog]:
    made = UsageLog(path, fsync_s=0)
    yield made
    made.close()


def test_a_line_is_in_the_file_when_append_returns(log: UsageLog, path: Path) -> None:
    assert [log.append(b"one"), log.append(b"two")] == [1, 2]
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_file_moved_away_is_followed_by_a_new_one(log: UsageLog, path: Path) -> None:
    log.append(b"old")
    path.rename(path.with_suffix(".1"))
    log.append(b"new")
    path.unlink()
    log.append(b"newest")
    assert path.with_suffix(".1").read_bytes() == b"old\n"
    assert path.read_bytes() == b"newest\n"


def test_a_truncated_file_goes_on(log: UsageLog, path: Path) -> None:
    log.append(b"gone")
    os.truncate(path, 0)
    log.append(b"new")
    assert path.read_bytes() == b"new\n"


def test_half_a_line_of_a_dead_process_spoils_no_other(log: UsageLog, path: Path) -> None:
    log.append(b"whole")
    with path.open("ab") as other:
        other.write(b'{"cut":')
    log.append(b"next")
    assert path.read_bytes() == b'whole\n{"cut":\nnext\n'


@pytest.mark.parametrize("room", range(1, 10))
def test_a_disk_that_is_full_within_a_line(
    path: Path, log: UsageLog, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Written again until it is there, a line is there once, wherever the first write was cut."""
    write = os.write
    line = b'{"a": 1}'
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:room]))
    try:
        log.append(line)
    except OSError:
        monkeypatch.setattr(os, "write", write)
        log.append(line)
    monkeypatch.setattr(os, "write", write)
    log.append(b'{"b": 2}')
    assert whole_lines(path) == [{"a": 1}, {"b": 2}]


def whole_lines(path: Path) -> list[object]:
    """As the documentation says to read: what is empty or no JSON is skipped."""
    found = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def test_many_lines_share_an_fsync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, calls = threading.Event(), threading.Event(), []
    real = os.fsync

    def slow(descriptor: int) -> None:
        calls.append(descriptor)
        began.set()
        assert go.wait(30)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    log = UsageLog(path, fsync_s=0)

    async def run() -> None:
        first = log.append(b"first")
        waiting = [asyncio.ensure_future(log.synced(first))]
        assert await asyncio.to_thread(began.wait, 30)  # the disk is busy with the first
        waiting += [asyncio.ensure_future(log.synced(log.append(b"%d" % i))) for i in range(50)]
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        go.set()
        await asyncio.gather(*waiting)
        assert len(calls) == 2
        await log.synced(51)  # nothing to wait for

    asyncio.run(run())
    log.close()


def test_a_disk_that_fails_is_told_to_all_who_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    log = UsageLog(path, fsync_s=0)

    async def run() -> None:
        number = log.append(b"line")
        for _ in range(2):  # also later: what came of the line nobody knows
            with pytest.raises(OSError, match="input/output"):
                await log.synced(number)

    asyncio.run(run())
    log.close()


WRITER = """
import sys
from pathlib import Path
from headrace.observe.usage_log import UsageLog
log = UsageLog(Path(sys.argv[1]), 1.0)
for number in range(10**6):
    log.append(b'{"writer": %s, "number": %d, "pad": "%s"}' % (sys.argv[2].encode(), number, b"x" * 900))
    print(number, flush=True)
"""  # noqa: E501


def test_kill_9_takes_no_line_that_was_appended(path: Path) -> None:
    """Three processes write at once and die at once: what each said is written is there, whole."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(number)], stdout=subprocess.PIPE
        )
        for number in range(3)
    ]
    for writer in writers:
        assert writer.stdout is not None, "a pipe"
        for _ in range(50):
            writer.stdout.readline()
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    said = []
    for number, writer in enumerate(writers):
        rest = writer.communicate()[0].split(b"\n")[:-1]  # the last may be cut short
        said += [(number, count) for count in range(50 + len(rest))]
    found = set()
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # empty, or the half line of a death
        found.add((record["writer"], record["number"]))
    assert len(said) >= 150
    assert not set(said) - found

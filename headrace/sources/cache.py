"""headrace's own folder for downloads, and the two things that keep it true: locks and marks.

A mark is a small JSON file beside a finished file. It is written last, so a download that was
interrupted has none; it holds size and time of the file, so a changed file counts as unmarked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

_CHUNK = 1 << 20


class Mark(msgspec.Struct, frozen=True):
    """`sha256` was true of the file when it had this size and modification time."""

    file: str
    size_bytes: int
    mtime_ns: int
    sha256: str


def cache_home(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_CACHE_HOME/headrace, or ~/.cache/headrace."""
    base = environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "headrace"


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Hold `path` against other processes. Yields whether someone else had it first.

    The lock goes with its process: nothing is left behind by one that is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            fcntl.flock(file, fcntl.LOCK_EX)
        yield waited


def marked(path: Path) -> Mark | None:
    """The mark of `path` if the file is still what was marked."""
    try:
        mark = msgspec.json.decode(_mark_path(path).read_bytes(), type=Mark)
        stat = path.stat()
    except (OSError, msgspec.DecodeError):
        return None
    same = (mark.file, mark.size_bytes, mark.mtime_ns) == (
        path.name,
        stat.st_size,
        stat.st_mtime_ns,
    )
    return mark if same else None


def mark_finished(path: Path, sha256: str) -> None:
    """Say that `path` is whole."""
    stat = path.stat()
    mark = Mark(path.name, stat.st_size, stat.st_mtime_ns, sha256)
    write_whole(_mark_path(path), msgspec.json.encode(mark))


def _mark_path(path: Path) -> Path:
    return path.with_name(path.name + ".mark")


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """`path` holds all of `data` or what it held before."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when the block ends well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def copy_hashed(source: IO[bytes], target: IO[bytes], digest: hashlib._Hash) -> None:
    """Copy everything; `digest` takes in what was copied."""
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        target.write(chunk)

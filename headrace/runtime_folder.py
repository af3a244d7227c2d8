"""A server's folder for what its processes share: gone with the server, also if that is killed.

Its owner holds a lock on the file `alive` in it. The system lets go of a lock when its holder ends,
however that comes; so a folder whose lock is free belongs to a dead server, and the next one that
starts removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "headrace-"
_ALIVE = "alive"


@contextmanager
def runtime_folder(name: str = "") -> Iterator[Path]:
    """A new folder of this user alone, with `name` in its own; those of the dead are removed."""
    remove_dead()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}"))  # mkdtemp makes it 0700
    lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_dead() -> None:
    """Folders of this user's servers that were killed. Those that live are left alone."""
    for alive in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_ALIVE}"):
        try:
            if alive.parent.is_symlink() or alive.stat().st_uid != os.geteuid():
                continue
            lock = os.open(alive, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # its owner removes it just now, or keeps it from us
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(alive.parent, ignore_errors=True)
        except BlockingIOError:
            pass  # it lives
        finally:
            os.close(lock)


def _lock(folder: Path) -> int:
    """The descriptor that holds it. The file gets its name when it is locked: a folder that is
    being made looks like nobody's, never like a dead one's."""
    new = folder / f"{_ALIVE}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(folder / _ALIVE)
    return lock

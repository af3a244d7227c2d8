"""Python's bytecode of a large package, kept where nobody else keeps it.

To compile the Python of torch takes two seconds of every start, unless its bytecode lies beside it.
An installer leaves it there, or the first import does; not so in images made without, where
PYTHONDONTWRITEBYTECODE or the owner of the folder keeps imports from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from headrace import __version__


def unkept(package: str) -> bool:
    """Whether it has no bytecode, and an import would leave none."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return False
    return sys.dont_write_bytecode or not os.access(os.path.dirname(spec.origin), os.W_OK)


@contextmanager
def kept(package: str, folder: Path) -> Iterator[None]:
    """Inside, bytecode of all that is imported lies under `folder`, where `package` is `unkept`;
    else nothing changes. Python finds out whether it is that of the source, by time and size, and
    in many images all files have one time: so each release of `package` and of ours has its own."""
    if not unkept(package):
        yield
        return
    before = sys.pycache_prefix, sys.dont_write_bytecode
    own = folder / f"{package}-{_release(package)}-headrace-{__version__}"
    sys.pycache_prefix, sys.dont_write_bytecode = str(own), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def _release(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # a start without it is shorter

    try:
        return version(package)
    except PackageNotFoundError:  # its folder is on the path, and no more
        return "unreleased"

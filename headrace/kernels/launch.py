"""Launches kernels; while `compiling` is open it only compiles them, many side by side.

A kernel is compiled for the types and constants of its arguments, so the way to compile all that a
program needs is to call what it will call, with the same arguments, and launch nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton

_compiling = False  # one thread launches; see `compiling`
_compiled = 0


def _count(**_facts: Any) -> None:
    global _compiled
    _compiled += 1


triton.knobs.runtime.jit_post_compile_hook = _count


def compiled() -> int:
    """Kernels that this process has compiled, or fetched from the cache on disk, so far."""
    return _compiled


def launch(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), or only its compilation."""
    if _compiling:
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@contextlib.contextmanager
def compiling(workers: int) -> Iterator[None]:
    """Inside, launches compile and do not run; at the end all compilations are done.

    Not for two threads at once. Raises what a compilation raised.
    """
    global _compiling
    with ThreadPoolExecutor(workers, "compile") as pool, triton.AsyncCompileMode(pool):
        _compiling = True
        try:
            yield
        finally:
            _compiling = False

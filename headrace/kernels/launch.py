"""Launches kernels; while `compiling` is open it only compiles them, many side by side.

A kernel is compiled for the types and constants of its arguments, so the way to compile all that a
program needs is to call what it will call, with the same arguments, and launch nothing.

Triton calls a compiled kernel through a small module of C, which it builds with the machine's C
compiler when the kernel is first launched: half a second each, one after another. `compiling`
builds those too, side by side, into the same cache on disk.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import triton
from triton.runtime._async_compile import active_mode
from triton.runtime.driver import driver

_compiling = False  # one thread launches; see `compiling`


class _Counts:
    """Compilations end on many threads."""

    def __init__(self) -> None:
        self.compiled = self.fetched = 0
        self._lock = threading.Lock()
        self._before = triton.knobs.compilation.listener
        triton.knobs.compilation.listener = self._hear

    def _hear(self, *, cache_hit: bool, **facts: Any) -> None:
        with self._lock:
            self.fetched += cache_hit
            self.compiled += not cache_hit
        if self._before is not None:
            self._before(cache_hit=cache_hit, **facts)


_counts = _Counts()


def compiled() -> int:
    """Kernels that this process has compiled so far: a second or so each."""
    return _counts.compiled


def fetched() -> int:
    """Kernels that it found compiled in the cache on disk instead: some milliseconds each."""
    return _counts.fetched


def launch(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), or only its compilation."""
    if _compiling:
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


class _WithLaunchers(Executor):
    """Compilations on a pool, each followed by the module of C that will launch the kernel."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._built = set[str]()  # signatures, which is all that such a module depends on
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor`."""
        return self._pool.submit(self._compiled, fn, *args, **kwargs)

    def _compiled(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        kernel = fn(*args, **kwargs)
        signature = repr(kernel.src.signature)
        with self._lock:
            first = signature not in self._built
            self._built.add(signature)
        if first:
            driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


@contextlib.contextmanager
def compiling(workers: int, *, trying: bool = False) -> Iterator[None]:
    """Inside, launches compile and do not run; at the end all compilations are done.

    Not for two threads at once. Raises what a compilation raised; `trying`: whoever launches such a
    kernel hears of it, nobody else.
    """
    global _compiling
    try:
        with (
            ThreadPoolExecutor(workers, "compile") as pool,
            triton.AsyncCompileMode(_WithLaunchers(pool), ignore_errors=trying),
        ):
            _compiling = True
            yield
    finally:
        _compiling = False
        active_mode.set(None)  # where a compilation failed, Triton leaves its own

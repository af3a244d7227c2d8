"""Launches kernels; while `compiling` is open it only compiles them, many side by side.

A kernel is compiled for the types and constants of its arguments, so the way to compile all that a
program needs is to call what it will call, with the same arguments, and launch nothing.

Triton calls a compiled kernel through a small module of C, which it builds with the machine's C
compiler when the kernel is first launched: half a second each, one after another. `compiling`
builds those too, into the same cache on disk. Both are work for children: see `forked`. What the
cache has needs none: forking sixteen processes of this size takes longer than all that they find.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import FileCacheManager, get_cache_manager
from triton.runtime.driver import driver

from headrace.kernels import key
from headrace.kernels.forked import run_forked

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

    def made_elsewhere(self, count: int) -> None:
        """So many will be found on disk only because children of ours have just made them."""
        with self._lock:
            self.compiled += count
            self.fetched -= count


_counts = _Counts()


def compiled() -> int:
    """Kernels that this process, or a child of it, has compiled so far: a second or so each."""
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


def _on_disk(name: str) -> bool:
    """Whether the cache holds what Triton keys by this name, as far as Triton itself looks. Of a
    cache that is elsewhere nobody knows."""
    manager = get_cache_manager(hashlib.sha256(name.encode()).hexdigest())
    if not isinstance(manager, FileCacheManager):
        return False
    lists = [found.name for found in Path(manager.cache_dir).glob("__grp__*")]
    groups = {file: manager.get_group(file) for file in (n.removeprefix("__grp__") for n in lists)}
    return any(file in (group or ()) for file, group in groups.items())


class _Collected(Executor):
    """Compilations that are asked for, until `run` makes them.

    Each is followed by the module of C that will launch the kernel. What the cache on disk lacks,
    children leave there; then this process takes all from it, or makes what is still missing.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._built = set[str]()  # signatures, which is all that such a module depends on
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor`."""
        future: Future[Any] = Future()
        self._asked.append((functools.partial(fn, *args, **kwargs), future))
        return future

    def run(self, workers: int) -> None:
        """Side by side; the futures are done then."""
        missing = self._missing()
        if min(workers, len(missing)) > 1:
            jobs = [functools.partial(self._anew, fn) for fn in missing]
            _counts.made_elsewhere(run_forked(jobs, workers))
            missing = self._missing()
        # To read them is Python's work: threads would only take turns.
        pool = ThreadPoolExecutor(max(1, min(workers, len(missing))), "compile")
        try:
            for fn, future in self._asked:
                pool.submit(self._settle, fn, future)
            pool.shutdown()
        except BaseException:  # a stop: what is not begun never is
            pool.shutdown(wait=False, cancel_futures=True)
            raise

    def _missing(self) -> list[Callable[[], Any]]:
        """Those that the cache lacks. Triton writes its key on each future."""
        return [fn for fn, future in self._asked if not _on_disk(vars(future)["_key"])]

    def _anew(self, fn: Callable[[], Any]) -> bool:
        """In a child: whether the cache did not have it."""
        before = _counts.compiled
        self._compiled(fn)
        return _counts.compiled > before

    def _settle(self, fn: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(self._compiled(fn))
        except BaseException as error:
            future.set_exception(error)

    def _compiled(self, fn: Callable[[], Any]) -> Any:
        kernel = fn()
        signature = repr(kernel.src.signature)
        with self._lock:
            first = signature not in self._built
            self._built.add(signature)
        if first:
            driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


class _Mode(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's, but the first launch of a kernel is remembered at once, as Triton 3.7 does: 3.6
    makes the key of each launch anew until all are compiled, where most are of a few kernels."""

    def submit(self, key: str, compile_fn: Any, finalize_fn: Callable[[Any], None]) -> Any:
        kernel = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(kernel)
        return kernel

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """What was not compiled because something failed, or was to stop, is forgotten: nobody
        waits for it, and whoever launches it later compiles it."""
        if kind is None:
            super().__exit__(kind, error, trace)
            return
        for kernel in self.future_kernels.values():
            if kernel.future.cancel():
                kernel.finalize_compile(None)


@contextlib.contextmanager
def compiling(workers: int, *, trying: bool = False) -> Iterator[None]:
    """Inside, launches compile and do not run; at the end all compilations are done.

    Not for two threads at once. Raises what a compilation raised; `trying`: whoever launches such a
    kernel hears of it, nobody else. Where what is inside raises, or a stop does, it ends at once.
    """
    global _compiling
    key.wait()
    try:
        collected = _Collected()
        with _Mode(collected, ignore_errors=trying):
            _compiling = True
            yield
            collected.run(workers)
    finally:
        _compiling = False
        active_mode.set(None)  # where a compilation failed, Triton leaves its own

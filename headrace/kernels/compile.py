"""Kernels compiled before they are needed: many at a time, into a cache on disk, and counted.

Triton compiles a kernel at its first launch with a new signature, for a second or so, on the
launching thread. A server that meets one while it serves stalls every request, so it compiles
what it will launch at its start, and counts what it compiled since.
"""

from __future__ import annotations

import contextvars
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode

Job = Callable[[], object]


def use_cache(card: str) -> Path:
    """Sets Triton's cache folder, made if need be, and returns it. Call before any compile.

    $HEADRACE_CACHE or ~/.cache/headrace, then triton/<key of Triton's version, the card and the
    sources of all kernels>: a changed kernel never meets an old one's files, and an old folder can
    be deleted whole. A TRITON_CACHE_DIR that is already set stays.
    """
    chosen = os.environ.get("TRITON_CACHE_DIR")
    if not chosen:
        home = os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace"
        name = re.sub(r"[^a-z0-9]+", "-", f"{triton.__version__} {card}".lower()).strip("-")
        chosen = str(Path(home) / "triton" / f"{name}-{_sources_key()}")
        os.environ["TRITON_CACHE_DIR"] = chosen
    folder = Path(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _sources_key() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Compiles:
    """Counts of this process: `count` kernels compiled, `loads` found in the cache on disk.

    Kernels that the process already held count as neither. `since_mark` is what a server exports:
    compiles since it said that it was ready; it should stay 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.loads = 0
        self._marked = 0
        self._lock = threading.Lock()
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._hear

    def _hear(self, *, cache_hit: bool, **rest: Any) -> None:
        with self._lock:  # compiles end on many threads
            self.loads += cache_hit
            self.count += not cache_hit
        if self._before is not None:
            self._before(cache_hit=cache_hit, **rest)

    def mark(self) -> None:
        """From here on `since_mark` counts."""
        self._marked = self.count

    @property
    def since_mark(self) -> int:
        return self.count - self._marked

    def close(self) -> None:
        """Puts back the listener that was there before."""
        knobs.compilation.listener = self._before


def compile_all(jobs: Sequence[Job], workers: int) -> float:
    """Compiles what the jobs would launch, on `workers` threads. Returns the seconds it took.

    A job calls the functions that launch kernels with the tensors (or sizes and types) of the real
    call, or `kernel.warmup(...)`: each launch of a kernel that this process has not compiled is
    noted instead of made, so its signature is the real one and its outputs stay unwritten. A job
    must not read them. A kernel that is compiled already is launched. Raises what a compile raised.

    Threads, because a compile spends its time in LLVM and ptxas, outside the interpreter's lock.
    The first launch of each kernel still loads it onto the device: a millisecond.
    """
    assert knobs.runtime.jit_cache_hook is None, "something else hooks Triton's compiles"
    started_s = time.monotonic()
    noted: dict[tuple[int, str], tuple[Any, str]] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        noted[id(fn.jit_function), key] = (fn.jit_function, compile["specialization_data"])
        return True  # neither compile nor launch

    knobs.runtime.jit_cache_hook = note
    try:
        for job in jobs:
            job()
    finally:
        knobs.runtime.jit_cache_hook = None
    # In a context of its own: a failing compile leaves AsyncCompileMode's variable set.
    contextvars.copy_context().run(_preload, list(noted.values()), workers)
    return time.monotonic() - started_s


def _preload(noted: list[tuple[Any, str]], workers: int) -> None:
    with ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool):
        for function, specialization in noted:
            function.preload(specialization)

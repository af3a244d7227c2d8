"""The one thread pool of the kernels."""

from __future__ import annotations

import ctypes

from headrace.errors import ConfigError
from headrace.native.library import Library, Op, Step

SPIN_US = 20  # of a thread without work, before it sleeps


class Pool:
    """`threads` threads, the caller of `run` among them; they sleep between steps.

    They run wherever the process may (`taskset`, cgroups); none is tied to a core of its own.
    `isa`: a kernel table by name, "" = the best this processor runs. Raises ConfigError for one
    that it does not run.
    """

    def __init__(
        self,
        library: Library,
        threads: int,
        *,
        isa: str = "",
    ) -> None:
        assert threads >= 1, "the caller is a thread"
        self.library = library
        self._handle = library.pool_new(threads, SPIN_US, isa.encode())
        if not self._handle:
            raise ConfigError(f"this processor does not run the {isa} kernels")
        self.threads = threads
        self.isa: str = library.pool_isa(self._handle).decode()

    def run(self, ops: ctypes.Array[Op], step: Step) -> None:
        """Run the ops one after another, each on all threads. One caller at a time."""
        assert self._handle, "the pool is closed"
        self.library.run(self._handle, ops, len(ops), ctypes.byref(step))

    def close(self) -> None:
        """End the threads."""
        if self._handle:
            self.library.pool_free(self._handle)
            self._handle = None

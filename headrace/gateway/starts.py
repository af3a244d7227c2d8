"""Workers that the gateway runs itself: a command each, started when the first request wants it, or
at once where it is to be kept warm.

Life: cold -> starting -> running -> cold again, when it was idle for long or its process ended. One
whose process ends before it is up has failed: it is tried again after a while that doubles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.children import FIRST_PAUSE_S, LAST_PAUSE_S, die_with_parent

log = logging.getLogger("headrace.gateway")

State = Literal["cold", "starting", "running", "failed"]
KILL_AFTER_S = 45.0  # a worker drains first; its own deadlines are shorter
SETUP = 2  # exit code: what it was asked cannot be


class StartSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the gateway starts a worker: `[workers.start]` of the fleet file."""

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    warm: bool = False  # start it with the gateway, and again when it ends
    env: dict[str, str] = {}  # beside the gateway's own
    cores: tuple[int, ...] = ()  # processor cores that it may use; none = all
    idle_stop_s: Annotated[float, Meta(ge=0)] = 0.0  # stop it after so long without a request
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0  # longest time until it is up


class Started:
    """The process of one worker. Event loop only."""

    def __init__(self, name: str, spec: StartSpec) -> None:
        self.name, self.spec = name, spec
        self.state: State = "cold"
        self.why = ""  # of failed
        self.ever_up = False
        self.failures = 0
        self.last_failure = ""  # why
        self.hopeless = False  # it says that it can never start as it was asked
        self.tell: Callable[[str], None] = partial(log.info, "%s | %s", name)  # gets its lines
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._pause_s = FIRST_PAUSE_S
        self._again_s = self._since_s = self._used_s = 0.0
        self._ending = False  # it was told to stop

    def want(self, now_s: float) -> bool:
        """Somebody needs it: whether it comes (one start for all who ask)."""
        self._used_s = now_s
        if self._task is None and (self.state == "cold" or now_s >= self._again_s):
            self.state, self.why, self._ending = "starting", "", False
            self._since_s = now_s
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self.state in ("starting", "running")

    def came_up(self) -> None:
        """A check of it succeeded."""
        if self.state == "starting":
            now_s = time.monotonic()
            log.info("worker %s started in %.1f s", self.name, now_s - self._since_s)
            self.state, self.ever_up = "running", True
            self._pause_s, self._used_s = FIRST_PAUSE_S, now_s

    @property
    def ending(self) -> bool:
        """It was told to stop, and takes nothing more."""
        return self._ending and self._task is not None

    def tick(self, now_s: float, busy: bool) -> None:
        """Called about once a second; busy: it has requests, or some wait for it."""
        spec = self.spec
        if busy or spec.warm:
            self._used_s = now_s
        if spec.warm and not self.hopeless:
            self.want(now_s)
        if self.state == "starting" and now_s - self._since_s > spec.timeout_s:
            self._end(f"not up after {spec.timeout_s:g} s", signal.SIGKILL)
        elif self.state == "running" and 0 < spec.idle_stop_s <= now_s - self._used_s:
            log.info("worker %s was idle for %g s: it stops", self.name, spec.idle_stop_s)
            self._ending = True
            self._end("", signal.SIGTERM)

    async def stop(self) -> None:
        """End it and wait for that."""
        self._ending = True
        if self._task is None:
            return
        self._end("", signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self._task), KILL_AFTER_S)
        except TimeoutError:
            self._end("", signal.SIGKILL)
            await self._task

    # ------------------------------------------------------------ inside

    def _end(self, why: str, number: signal.Signals) -> None:
        self.why = why or self.why
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _run(self) -> None:
        """Start it, pass on what it prints, see how it ends."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | self.spec.env,
                preexec_fn=partial(_first_in_child, os.getpid(), self.spec.cores),
            )
        except (OSError, ValueError) as error:
            self._over(f"{self.spec.command[0]} cannot be run: {error}", None)
            return
        if self._ending:
            self._end("", signal.SIGTERM)
        assert self._process.stdout is not None, "made with a pipe"
        await self._read(self._process.stdout)
        code = await self._process.wait()
        self._over(self.why or _how(code), code)

    async def _read(self, out: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await out.readline()
            except ValueError:  # longer than the reader's buffer, which is dropped
                continue
            if not line:
                return
            self.tell(line.decode(errors="replace").rstrip())

    def _over(self, why: str, code: int | None) -> None:
        self._process = self._task = None
        if self._ending:
            self.state = "cold"
            return
        log.warning("worker %s ended: %s", self.name, why)
        self.state, self.why = "failed", why
        self.failures, self.last_failure = self.failures + 1, why
        self.hopeless = code == SETUP and not self.ever_up
        self._again_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)


def _first_in_child(parent: int, cores: tuple[int, ...]) -> None:
    os.setpgrp()  # Ctrl-C reaches the gateway alone, which drains first
    die_with_parent(signal.SIGTERM, parent)
    if cores:
        os.sched_setaffinity(0, cores)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

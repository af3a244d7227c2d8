"""Starts, watches and stops the processes of one server. Knows no torch and no HTTP.

The engine is one process, HTTP is one or more. Each child leads a process group of its own (Ctrl-C
reaches the supervisor alone) and dies with the supervisor, so none is orphaned.

SIGTERM or SIGINT drains; a second one kills. Exit codes: 0 stopped, 2 a process could not start,
3 the engine died, 4 the HTTP processes keep dying.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace import launch
from headrace.backends.choose import resolve_api_workers, resolve_backend
from headrace.children import die_with_parent
from headrace.config import Settings, is_loopback
from headrace.errors import ConfigError
from headrace.load_bar import LoadBar
from headrace.pages import give_back
from headrace.sources.files import ModelFiles

if TYPE_CHECKING:
    from headrace.observe.telemetry import Telemetry

PR_SET_NAME = 15  # linux/prctl.h
EXIT_SETUP, EXIT_ENGINE_DIED, EXIT_API_DIED = 2, 3, 4
KILL_AFTER_S = 5.0  # a child that ignores SIGTERM for this long is killed
PROBE_EVERY_S = 0.05  # while starting
MAX_API_RESTARTS = 5  # within one server's life; more means something is wrong

_spawn = mp.get_context("spawn")


def _child(parent: int, name: str, entry: Callable[..., None], *args: Any) -> None:
    """First code of every child. `name` is what ps and top show (15 bytes at most)."""
    os.setpgrp()
    die_with_parent(signal.SIGKILL, parent)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    entry(*args)


class Supervisor:
    """One server: `run()` blocks until it is stopped and returns the exit code."""

    def __init__(
        self, settings: Settings, files: ModelFiles, say: Callable[[str], None], begun_s: float
    ) -> None:
        self.settings, self.files, self.say, self.begun_s = settings, files, say, begun_s
        self.sock = _listen(settings)
        self.workers = resolve_api_workers(settings)
        self.api: list[mp.process.BaseProcess] = []
        self.engine: mp.process.BaseProcess | None = None
        self.pipe: Connection | None = None
        self.signals = 0  # SIGTERM and SIGINT so far
        self.loaded = self.ready = False  # the engine said so; /ready says so
        self.api_restarts = 0
        self.telemetry: Telemetry | None = None
        self.bar = LoadBar(lambda line: say(f"  {line}"), shown=sys.stderr.isatty())

    def run(self) -> int:
        self._banner()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-"))  # mkdtemp makes it 0700
        try:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self.folder / "metrics")
            (self.folder / "metrics").mkdir()
            self._start_telemetry()
            self._start_engine()
            for worker in range(self.workers.value):
                self.api.append(self._start_api(worker))  # one by one: `_stop` knows what started
            return self._watch(wake_read)
        finally:
            self._stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _on_signal(self, number: int, frame: object) -> None:
        self.signals += 1
        name = signal.Signals(number).name
        if self.signals == 1:
            self.say(f"{name}: draining, up to {self.settings.shutdown_timeout_s:g} s")
        elif self.signals == 2:
            self.say(f"{name} again: ending at once")
            for process in self._processes():
                process.kill()

    def _processes(self) -> list[mp.process.BaseProcess]:
        return [*self.api, *([self.engine] if self.engine else [])]

    # ------------------------------------------------------------ processes

    def _start(self, name: str, entry: Callable[..., None], *args: Any) -> mp.process.BaseProcess:
        full_name = f"headrace-{name}"
        process = _spawn.Process(
            target=_child,
            args=(os.getpid(), full_name, entry, *args),
            name=full_name,
            daemon=True,  # should `_stop` be cut short, the exit ends it instead of waiting for it
        )
        process.start()
        return process

    def _start_engine(self) -> None:
        self.pipe, theirs = _spawn.Pipe(duplex=False)
        self.engine = self._start(
            "engine", launch.engine_process, self.folder, self.settings, self.files, theirs
        )
        theirs.close()

    def _start_telemetry(self) -> None:
        if self.settings.telemetry_s:
            # Not before PROMETHEUS_MULTIPROC_DIR is set.
            from headrace.observe.telemetry import Telemetry

            self.telemetry = Telemetry(self._pids, self.settings.telemetry_s)
            self.telemetry.start()

    def _pids(self) -> dict[str, int]:
        """Of all processes of the server."""
        children = {
            process.name.removeprefix("headrace-"): process.pid
            for process in self._processes()
            if process.pid is not None
        }
        return {"supervisor": os.getpid(), **children}

    def _start_api(self, worker: int) -> mp.process.BaseProcess:
        args = (self.folder, self.settings, self.files, worker, self.sock)
        return self._start(f"api-{worker}", launch.api_process, *args)

    # ------------------------------------------------------------ watching

    def _watch(self, wake: int) -> int:
        """Until a signal (0), or a child's end that ends the server (its code)."""
        while not self.signals:
            assert self.engine is not None, "the engine is started before it is watched"
            pipe = [self.pipe] if self.pipe is not None else []
            sentinels = [self.engine.sentinel, *(p.sentinel for p in self.api)]
            starting = self.loaded and not self.ready
            ready = wait([*pipe, *sentinels, wake], timeout=PROBE_EVERY_S if starting else None)
            if starting and self._answers():
                self._greet()
            if self.pipe is not None and self.pipe in ready:
                self._hear()
            if wake in ready:
                continue
            if self.engine.sentinel in ready:
                code = self._engine_ended(self.engine)
                if code is not None:
                    return code
            for worker, process in enumerate(self.api):
                if process.sentinel in ready:
                    code = self._api_ended(worker, process)
                    if code is not None:
                        return code
        return 0

    def _hear(self) -> None:
        """One message of the engine's start."""
        assert self.pipe is not None, "called only when the pipe is readable"
        try:
            kind, what, seconds = self.pipe.recv()
        except (EOFError, OSError):
            self.pipe = None
            self.bar.stop()
            return
        if kind == "weights":
            self.bar.show(*what)
            return
        self.bar.stop()
        if kind == "phase":
            self.say(f"  {what}" if not seconds else f"  {what:<28} {seconds:6.2f} s")
        elif kind == "failed":
            self.say(f"headrace: {what}")
        else:
            self.loaded = True
            if self.telemetry is not None and what.device_uuid:
                self.telemetry.watch(what.device_uuid)

    def _answers(self) -> bool:
        """Whether /ready says 200: the HTTP processes came up and hear the engine."""
        import http.client  # now, while those that it asks are starting

        host, port = self._address()
        connection = http.client.HTTPConnection(host, port, timeout=1.0)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _engine_ended(self, engine: mp.process.BaseProcess) -> int | None:
        while self.pipe is not None and self.pipe.poll():
            self._hear()
        if not self.loaded:
            self.say(f"the engine did not start ({_how(engine)})")
            return EXIT_SETUP
        self.say(f"the engine process died ({_how(engine)})")
        from prometheus_client.multiprocess import mark_process_dead  # as in _start_telemetry

        # Its gauges say nothing any more; its counters still count.
        mark_process_dead(engine.pid, str(self.folder / "metrics"))  # type: ignore[no-untyped-call]
        if not self.settings.restart:
            return EXIT_ENGINE_DIED
        self.say("starting it again (restart = true)")
        self.loaded = self.ready = False
        self.begun_s = time.perf_counter()
        self._start_engine()
        return None

    def _api_ended(self, worker: int, process: mp.process.BaseProcess) -> int | None:
        how = _how(process)
        if process.exitcode == EXIT_SETUP:
            self.say(f"HTTP process {worker} did not start")
            return EXIT_SETUP
        self.api_restarts += 1
        if self.api_restarts > MAX_API_RESTARTS:
            self.say(f"HTTP process {worker} died ({how}); they keep dying: giving up")
            return EXIT_API_DIED
        self.say(f"HTTP process {worker} died ({how}); starting it again")
        self.api[worker] = self._start_api(worker)
        return None

    # ------------------------------------------------------------ the end

    def _stop(self) -> None:
        """HTTP first (it drains), then the engine; whoever ignores SIGTERM is killed."""
        self.bar.stop()
        if self.telemetry is not None:
            self.telemetry.stop()
        self.sock.close()
        drain_s = self.settings.shutdown_timeout_s + KILL_AFTER_S
        _end(self.api, drain_s)
        _end([self.engine] if self.engine else [], KILL_AFTER_S)
        self.say("stopped")

    # ------------------------------------------------------------ words

    def _banner(self) -> None:
        backend = resolve_backend(self.settings)
        self.say(
            f"headrace {headrace.__version__}: {self.files.name} on {backend.value} "
            f"({backend.reason}), {self.workers.value} HTTP process(es)"
        )
        if self.files.kind != "fake":
            self.say(f"  model files: {self.files.path}")

    def _address(self) -> tuple[str, int]:
        """Where a client on this machine finds the server."""
        host, port = self.sock.getsockname()[:2]
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port

    def _greet(self) -> None:
        self.ready = True
        host, port = self._address()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        keyed = bool(self.settings.api_key or self.settings.admin_key)
        key = " -H 'authorization: Bearer YOUR_KEY'" if keyed else ""
        self.say(
            f"try: curl {url}/v1/chat/completions{key} -H 'content-type: application/json' "
            f'-d \'{{"model": "{self.files.name}", "max_tokens": 40, '
            f'"messages": [{{"role": "user", "content": "What is a headrace?"}}]}}\''
        )
        if self.settings.ui and (keyed or is_loopback(self.settings.host)):
            self.say(f"look: {url}/ui")
        give_back()
        self.say(f"ready in {time.perf_counter() - self.begun_s:.1f} s: {url}")


def _how(process: mp.process.BaseProcess) -> str:
    """How an ended process ended; collects it."""
    process.join()
    code = process.exitcode
    return f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"


def _end(processes: list[mp.process.BaseProcess], patience_s: float) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + patience_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}", param="port"
        ) from None
    return sock

"""Starts, watches and stops the processes of one server. Knows no torch and no HTTP.

The engine is one process, HTTP is one or more. Each child leads a process group of its own (Ctrl-C
reaches the supervisor alone) and dies with the supervisor, so none is orphaned.

SIGTERM or SIGINT drains; a second one kills. An engine that dies again and again is started again
ever later. Exit codes: 0 stopped, 2 a process could not start,
3 the engine died, 4 the HTTP processes keep dying.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

import headrace
from headrace import launch
from headrace.backends.choose import resolve_api_workers, resolve_backend
from headrace.children import SPAWN, Pauses, end_children, how_it_ended, on_stop, start_child
from headrace.config import Settings, is_loopback
from headrace.errors import ConfigError
from headrace.load_bar import LoadBar
from headrace.pages import give_back
from headrace.runtime_folder import runtime_folder
from headrace.sources.files import ModelFiles

if TYPE_CHECKING:
    from headrace.observe.telemetry import Telemetry

EXIT_SETUP, EXIT_ENGINE_DIED, EXIT_API_DIED = 2, 3, 4
KILL_AFTER_S = 5.0  # a child that ignores SIGTERM for this long is killed
PROBE_EVERY_S = 0.05  # while starting
MAX_API_RESTARTS = 5  # within one server's life; more means something is wrong


class Supervisor:
    """One server: `run()` blocks until it is stopped and returns the exit code."""

    def __init__(
        self, settings: Settings, files: ModelFiles, say: Callable[[str], None], begun_s: float
    ) -> None:
        self.settings, self.files, self.say, self.begun_s = settings, files, say, begun_s
        self.sock = _listen(settings)
        self.workers = resolve_api_workers(settings)
        self.api: list[BaseProcess] = []
        self.engine: BaseProcess | None = None  # None: it is to be started at `again_s`
        self.again_s = 0.0
        self.pauses = Pauses()
        self.pipe: Connection | None = None
        self.signals = 0  # SIGTERM and SIGINT so far
        self.loaded = self.ready = False  # the engine said so; /ready says so
        self.loaded_s = 0.0  # time.monotonic() of the first; 0 = no engine ever was
        self.api_restarts = 0
        self.telemetry: Telemetry | None = None
        self.bar = LoadBar(lambda line: say(f"  {line}"), shown=sys.stderr.isatty())

    def run(self) -> int:
        self._banner()
        wake = on_stop(self._on_signal)
        with runtime_folder() as self.folder:
            try:
                os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self.folder / "metrics")
                (self.folder / "metrics").mkdir()
                self._start_engine()  # first: it takes longest
                self._start_telemetry()
                for worker in range(self.workers.value):
                    self.api.append(self._start_api(worker))  # `_stop` knows what started
                return self._watch(wake)
            finally:
                self._stop()

    def _on_signal(self, number: int, frame: object) -> None:
        self.signals += 1
        name = signal.Signals(number).name
        if self.signals == 1:
            self.say(f"{name}: draining, up to {self.settings.shutdown_timeout_s:g} s")
        elif self.signals == 2:
            self.say(f"{name} again: ending at once")
            for process in self._processes():
                process.kill()

    def _processes(self) -> list[BaseProcess]:
        return [*self.api, *([self.engine] if self.engine else [])]

    # ------------------------------------------------------------ processes

    def _start_engine(self) -> None:
        self.pipe, theirs = SPAWN.Pipe(duplex=False)
        args = (self.folder, self.settings, self.files, theirs)
        self.engine = start_child("headrace-engine", launch.engine_process, *args)
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

    def _start_api(self, worker: int) -> BaseProcess:
        args = (self.folder, self.settings, self.files, worker, self.sock)
        return start_child(f"headrace-api-{worker}", launch.api_process, *args)

    # ------------------------------------------------------------ watching

    def _watch(self, wake: int) -> int:
        """Until a signal (0), or a child's end that ends the server (its code)."""
        while not self.signals:
            pipe = [self.pipe] if self.pipe is not None else []
            sentinels = [process.sentinel for process in self._processes()]
            starting = self.loaded and not self.ready
            limit_s = PROBE_EVERY_S if starting else None
            if self.engine is None:
                limit_s = max(0.0, self.again_s - time.monotonic())
            ready = wait([*pipe, *sentinels, wake], timeout=limit_s)
            if starting and self._answers():
                self._greet()
            if self.pipe is not None and self.pipe in ready:
                self._hear()
            if wake in ready:
                continue
            if self.engine is None:
                if time.monotonic() >= self.again_s:
                    self.begun_s = time.perf_counter()
                    self._start_engine()
            elif self.engine.sentinel in ready:
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
            self.loaded, self.loaded_s = True, time.monotonic()
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

    def _engine_ended(self, engine: BaseProcess) -> int | None:
        while self.pipe is not None and self.pipe.poll():
            self._hear()
        how = how_it_ended(engine)
        self.say(f"the engine {'process died' if self.loaded else 'did not start'} ({how})")
        if not self.loaded_s:
            return EXIT_SETUP
        from prometheus_client.multiprocess import mark_process_dead  # as in _start_telemetry

        # Its gauges say nothing any more; its counters still count.
        mark_process_dead(engine.pid, str(self.folder / "metrics"))  # type: ignore[no-untyped-call]
        if not self.settings.restart:
            return EXIT_ENGINE_DIED
        pause_s = self.pauses.after(time.monotonic() - self.loaded_s if self.loaded else 0.0)
        when = f" in {pause_s:g} s" if pause_s else ""
        self.say(f"starting it again{when} (restart = true)")
        self.loaded = self.ready = False
        self.engine, self.again_s = None, time.monotonic() + pause_s
        return None

    def _api_ended(self, worker: int, process: BaseProcess) -> int | None:
        how = how_it_ended(process)
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
        end_children(self.api, drain_s)
        end_children([self.engine] if self.engine else [], KILL_AFTER_S)
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

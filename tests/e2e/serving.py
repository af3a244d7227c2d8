"""A running server for tests: engine and HTTP processes, a port, and what they printed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.backends.choose import settled
from headrace.config import Settings

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0  # how long a test waits for what should come at once


@contextmanager
def kept_ports(count: int = 1) -> Iterator[int]:
    """The first of so many that follow each other, for servers that are started inside, and again:
    bound here and never listened at, so that nobody else gets them."""
    for _ in range(100):
        with ExitStack() as stack:
            made = [stack.enter_context(socket.socket()) for _ in range(count)]
            first = 0
            try:
                for at, one in enumerate(made):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    one.bind(("127.0.0.1", first and first + at))
                    first = first or one.getsockname()[1]
            except (OSError, OverflowError):
                continue  # somebody has the next one
            yield first
            return
    raise AssertionError(f"no {count} free ports that follow each other")


class Server:
    """`with Server(fake_step_ms=2.0) as server:`; keywords are `Settings`."""

    def __init__(self, *, workers: int = 1, **settings: Any) -> None:
        self.settings = settled(
            Settings(model="fake", served_model_name="fake", backend="fake", **settings)
        )
        self._workers = workers
        self.apis: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Server:
        self._scratch = tempfile.TemporaryDirectory(prefix="hr")
        self.folder = Path(self._scratch.name)
        self.metrics_folder = self.folder / "metrics"
        self.metrics_folder.mkdir()
        self.log_path = self.folder / "log"
        self._log = self.log_path.open("ab")
        self.sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = int(self.sock.getsockname()[1])
        self.engine = self.start_engine()
        self.apis = [self.start_api(worker) for worker in range(self._workers)]
        try:
            self.wait(lambda: all(map(_catches_sigterm, self.apis)), "every process drains")
            self.wait(lambda: self.get("/ready")[0] == 200, "ready")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in (*self.apis, self.engine):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        self.sock.close()
        self._log.close()
        if kind is not None:
            print(self.log_path.read_text()[-8000:])
        self._scratch.cleanup()

    def start_engine(self) -> subprocess.Popen[bytes]:
        """A new engine process on the same folder."""
        return self._start("engine")

    def start_api(self, worker: int) -> subprocess.Popen[bytes]:
        """A new HTTP process on the same socket."""
        return self._start("api", str(worker), str(self.sock.fileno()))

    def _start(self, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        script = str(ROOT / "tests" / "e2e" / "processes.py")
        raw = msgspec.json.encode(self.settings).decode()
        return subprocess.Popen(
            # prometheus_client leaves its mapped files to the end of the process.
            [
                sys.executable,
                "-W",
                "error",
                "-W",
                "ignore::ResourceWarning",
                script,
                role,
                str(self.folder),
                raw,
                *arguments,
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PROMETHEUS_MULTIPROC_DIR": str(self.metrics_folder),
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[self.sock.fileno()],
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on its own connection: status, headers, body. `body`: bytes, or JSON."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            head = {"content-type": "application/json"} if raw is not None else {}
            connection.request(method, path, raw, {**head, **(headers or {})})
            response = connection.getresponse()
            lowered = {name.lower(): value for name, value in response.getheaders()}
            return response.status, lowered, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded JSON (or text); status 0 when nobody listens."""
        try:
            status, headers, raw = self.request("GET", path, timeout_s=5)
        except OSError:
            return 0, None
        is_json = headers.get("content-type") == "application/json"
        return status, json.loads(raw) if is_json else raw.decode()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded JSON."""
        status, _, raw = self.request("POST", path, body)
        return status, json.loads(raw)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` whose labels include `labels`; 0 when there are none."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.request("GET", "/metrics")[2].decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Poll until `condition()`; fails with `what` after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"waited {timeout_s} s for: {what}"
            time.sleep(0.05)

    def wait_idle(self) -> None:
        """Until nothing runs or waits and no KV block is held."""
        names = (
            "headrace_requests_running",
            "headrace_requests_waiting",
            "headrace_kv_blocks_used",
        )
        self.wait(lambda: all(self.metric(name) == 0 for name in names), "idle gauges")


def events(raw: bytes) -> list[Any]:
    """The data of each SSE event; "[DONE]" as a string; comments left out."""
    out: list[Any] = []
    for block in raw.decode().split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            out.append(data if data == "[DONE]" else json.loads(data))
    return out


def _catches_sigterm(process: subprocess.Popen[bytes]) -> bool:
    """Any of them may answer /ready; one that starts late would die of a signal, not drain."""
    status = Path(f"/proc/{process.pid}/status")
    if process.poll() is not None or not status.exists():
        return True  # its end shows elsewhere; other systems have no such file
    caught = int(status.read_text().split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)

"""A whole server as its users start it: `headrace serve` in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

READY = re.compile(r"ready in [\d.]+ s: (http://\S+)")


class ServeProcess:
    """`with ServeProcess("--backend", "fake") as server:` waits until it is ready."""

    def __init__(self, *args: str, port: int = 0, wait: bool = True, **environ: str) -> None:
        command = [sys.executable, "-m", "headrace.cli.main", "serve", "--port", str(port), *args]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, **environ},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.wait_ready()

    def _read(self) -> None:
        assert self.process.stderr is not None, "stderr is a pipe"
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if match := READY.search(line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Until the ready line. Raises with everything the server said."""
        assert self._ready.wait(timeout_s), f"not ready after {timeout_s} s: {self.said}"
        assert self.url, f"it ended instead: {self.said}"

    @property
    def said(self) -> str:
        """All it printed so far."""
        return "\n".join(self.lines)

    @property
    def children(self) -> dict[str, int]:
        """Name -> pid of its processes: headrace-engine, headrace-api-0, ..."""
        return children(self.process.pid)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded body of a JSON request."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.end(timeout_s)

    def end(self, timeout_s: float = 60.0) -> int:
        """The exit code, once it has ended and `said` holds all that it printed."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None, "stderr is a pipe"
        self.process.stderr.close()


def children(parent: int) -> dict[str, int]:
    """Name -> pid of the processes that `parent` started."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if int(rest.split()[1]) == parent:
            found[name] = int(stat.parent.name)
    return found

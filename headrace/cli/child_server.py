"""A `headrace serve` that belongs to the command that started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from headrace.children import die_with_parent
from headrace.errors import SetupError

READY = re.compile(r"^ready\b.*?(https?://\S+)\s*$")
ANSWER_WITHIN_S = 30.0
STOP_AFTER_S = 45.0  # the server's own deadlines are shorter; this one is for a bug in them


class ChildServer:
    """Starts the server, waits until it is ready, stops it on exit.

    It leads a process group of its own, so that Ctrl-C in the terminal stops an answer and not the
    server; on Linux it also ends when this process dies without saying so.
    """

    def __init__(self, arguments: Sequence[str], say: Callable[[str], None]) -> None:
        """`say` gets what the server prints until it is ready. Raises SetupError if it ends."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.main", "serve", *arguments, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        self.pid = self._process.pid
        self.last_lines: deque[str] = deque(maxlen=50)
        try:
            self.url = self._wait_line(say)
            self._drain = threading.Thread(target=self._read_on, daemon=True)
            self._drain.start()
            self._wait_answer()
        except BaseException:
            self.stop()
            raise

    def _wait_line(self, say: Callable[[str], None]) -> str:
        assert self._process.stderr is not None, "stderr is a pipe"
        for line in self._process.stderr:
            self.last_lines.append(line.rstrip())
            if match := READY.match(line):
                return match[1]
            say(line.rstrip())
        code = self._process.wait()
        raise SetupError(f"the server did not start (exit code {code})")

    def _wait_answer(self) -> None:
        """The line says that one HTTP process is ready; the next may hear of it a moment later."""
        deadline_s = time.monotonic() + ANSWER_WITHIN_S
        while True:
            try:
                with urllib.request.urlopen(self.url + "/ready", timeout=ANSWER_WITHIN_S):
                    return
            except OSError as error:  # HTTPError (503) and URLError are both one
                if time.monotonic() > deadline_s or self._process.poll() is not None:
                    last = "\n".join(self.last_lines)
                    raise SetupError(f"{self.url} does not get ready: {error}\n{last}") from None
            time.sleep(0.05)

    def _read_on(self) -> None:
        """Keep the pipe empty: a full one would stop the server."""
        assert self._process.stderr is not None, "stderr is a pipe"
        for line in self._process.stderr:
            self.last_lines.append(line.rstrip())

    def stop(self) -> int:
        """SIGTERM, then wait: the server ends its own processes. Its exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(STOP_AFTER_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()
        finally:
            if drain := getattr(self, "_drain", None):
                drain.join()
            assert self._process.stderr is not None, "stderr is a pipe"
            self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

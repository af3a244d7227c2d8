"""`headrace gateway` as its users start it, before two real servers with the fake model."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import openai
import pytest

from tests.e2e.serving import PATIENCE_S, Server, events

ROOT = Path(__file__).resolve().parents[2]
LONG = {"model": "fake", "prompt": "long", "max_tokens": 900, "stream": True, "ignore_eos": True}


class GatewayProcess:
    """`with GatewayProcess("--worker", url) as gateway:` waits until it listens."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-W", "error", "-m", "headrace.cli.main", "gateway"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *args], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.said: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(PATIENCE_S), self.said
        assert self.port, self.said

    port = 0

    def _read(self) -> None:
        assert self.process.stderr is not None, "stderr is a pipe"
        for line in self.process.stderr:
            self.said.append(line)
            if match := re.search(r"gateway: http://127.0.0.1:(\d+)", line):
                self.port = int(match[1])
                self._ready.set()
        self._ready.set()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def workers(self) -> dict[str, Any]:
        rows = json.loads(self.ask("GET", "/gateway/workers")[1])["workers"]
        return {row["name"]: row for row in rows}

    def wait_up(self, count: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while sum(row["state"] == "up" for row in self.workers().values()) != count:
            assert time.monotonic() < deadline_s, self.workers()
            time.sleep(0.05)

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(PATIENCE_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._reader.join(10)
            assert self.process.stderr is not None, "stderr is a pipe"
            self.process.stderr.close()
        if kind is None:
            assert code == 0, self.said


@pytest.fixture(scope="module")
def mortal() -> Iterator[Server]:
    """A worker that tests stop and kill; slow enough to be in the middle of an answer."""
    with Server(fake_step_ms=5.0, max_model_len=2048) as server:
        yield server


def stream(port: int, out: list[bytes], began: threading.Event) -> None:
    """Read one stream to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(LONG))
        answer = connection.getresponse()
        whole = answer.read1()
        began.set()
        while data := answer.read1():
            whole += data
        out.append(whole)
    finally:
        began.set()
        connection.close()


def test_real_clients_get_answers_and_hits_are_confirmed(
    shared_server: Server, mortal: Server
) -> None:
    with GatewayProcess("--worker", shared_server.url, "--worker", mortal.url) as gateway:
        gateway.wait_up(2)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == ["fake"]
        text = " ".join(f"word{i}" for i in range(120))
        for _ in range(2):
            answer = client.chat.completions.with_raw_response.create(
                model="fake", messages=[{"role": "user", "content": text}], max_tokens=4
            )
        told = json.loads(
            gateway.ask("GET", "/gateway/decisions/" + answer.headers["x-request-id"])[1]
        )
        (attempt,) = told["attempts"]
        rows = {row["name"]: row for row in attempt["candidates"]}
        assert rows[attempt["worker"]]["predicted_cached_tokens"] > 0
        assert told["worker_said"]["cached_tokens"] > 0
        pieces = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": text}],
            max_tokens=4,
            stream=True,
        )
        seen = list(pieces)
        assert all(piece.usage is None and piece.choices for piece in seen)
        assert seen[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="fake", messages=[], max_tokens=-1)
        client.close()


def test_a_stopped_worker_is_out_within_5_s_and_a_killed_one_at_once(mortal: Server) -> None:
    """With the default settings. Its streams end with an error event both times."""
    with GatewayProcess("--worker", mortal.url) as gateway:
        gateway.wait_up(1)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            out: list[bytes] = []
            began = threading.Event()
            reader = threading.Thread(target=stream, args=(gateway.port, out, began))
            reader.start()
            assert began.wait(PATIENCE_S)
            os.kill(mortal.apis[0].pid, number)
            stopped_s = time.monotonic()
            reader.join(PATIENCE_S)
            took_s = time.monotonic() - stopped_s
            last = events(out[0])[-1]
            assert last["error"]["code"] == "worker_lost"
            assert b'finish_reason":"' not in out[0]
            assert took_s < 5 + 5, took_s  # 5 s is promised; the rest is for a busy machine
            gateway.wait_up(0)
            status, body = gateway.ask("POST", "/v1/completions", LONG | {"stream": False})
            assert (status, json.loads(body)["error"]["code"]) == (503, "no_worker")
            if number == signal.SIGSTOP:
                os.kill(mortal.apis[0].pid, signal.SIGCONT)
                gateway.wait_up(1)
                mortal.wait_idle()  # the gateway closed its connection: the request was aborted
        mortal.apis[0].wait()
        mortal.apis[0] = mortal.start_api(0)
        gateway.wait_up(1)
        assert gateway.ask("POST", "/v1/completions", LONG | {"max_tokens": 2})[0] == 200


def test_drain_from_the_command_line_and_sigterm_lets_streams_end(shared_server: Server) -> None:
    with GatewayProcess("--worker", shared_server.url) as gateway:
        gateway.wait_up(1)
        command = [sys.executable, "-m", "headrace.cli.main", "gateway", "drain"]
        where = ["--gateway", f"http://127.0.0.1:{gateway.port}", shared_server.url]
        for more, says, status in ((), "is empty", 503), (("--undo",), "takes", 200):
            ran = subprocess.run(
                [*command, *where, *more], capture_output=True, text=True, cwd=ROOT, timeout=60
            )
            assert says in ran.stdout, ran.stderr
            assert gateway.ask("GET", "/ready")[0] == status
        out: list[bytes] = []
        began = threading.Event()
        reader = threading.Thread(target=stream, args=(gateway.port, out, began))
        reader.start()
        assert began.wait(PATIENCE_S)
        gateway.process.send_signal(signal.SIGTERM)
        reader.join(PATIENCE_S)
        assert events(out[0])[-1] == "[DONE]"
        assert gateway.process.wait(PATIENCE_S) == 0

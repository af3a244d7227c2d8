"""`headrace gateway` as its users start it, before two real servers with the fake model."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.serving import PATIENCE_S, Server, events, kept_ports

ROOT = Path(__file__).resolve().parents[2]
LONG: dict[str, Any] = {
    "model": "fake",
    "prompt": "long",
    "max_tokens": 400,
    "stream": True,
    "ignore_eos": True,
}
ENDLESS = 2000


class GatewayProcess:
    """`with GatewayProcess("--worker", url) as gateway:` waits until it listens."""

    def __init__(self, *args: str, port: int = 0) -> None:
        command = [sys.executable, "-W", "error", "-m", "headrace.cli.main", "gateway"]
        self.process = subprocess.Popen(
            [*command, "--port", str(port), *args], stderr=subprocess.PIPE, text=True, cwd=ROOT
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
    """A worker that tests stop and kill; slow enough to be in the middle of an answer of ENDLESS
    tokens however slow the machine is."""
    with Server(fake_step_ms=10.0, max_model_len=2048) as server:
        yield server


@pytest.fixture(scope="module")
def before_one(shared_server: Server) -> Iterator[GatewayProcess]:
    with GatewayProcess("--worker", shared_server.url) as gateway:
        gateway.wait_up(1)
        yield gateway


def stream(port: int, out: list[bytes], began: threading.Event, tokens: int = 400) -> None:
    """Read one stream to its end, or to where it is cut."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(LONG | {"max_tokens": tokens}))
        answer = connection.getresponse()
        whole = answer.read1()
        began.set()
        with suppress(http.client.IncompleteRead, ConnectionError):
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
            extra_body={"ignore_eos": True},
        )
        seen = list(pieces)
        assert all(piece.usage is None and piece.choices for piece in seen)
        assert seen[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="fake", messages=[], max_tokens=-1)
        client.close()


@pytest.mark.parametrize(
    ("spelling", "status"),
    [
        ("/v1/%63hat/completions", 200),
        ("/v1/chat/completion%73?a=%62", 200),
        ("http://elsewhere/v1/%63hat/completions", 200),
        ("/v1/chat/completions#x?y", 200),
        ("/v1%2Fchat/completions", 404),
        ("/v1/chat%2fcompletions", 404),
        ("/v1/%2563hat/completions", 404),
        ("//v1/chat/completions", 404),
        ("/v1/chat/completions/", 404),
        ("/v1/./chat/completions", 404),
        ("/v1/%2e%2E/v1/chat/completions", 404),
        ("/v1/chat/completions;x", 404),
        ("/v1/chat/completions%00", 404),
        ("/v1/chat/completions%", 404),
        ("/V1/chat/completions", 404),
        ("http://elsewhere", 404),
        ("http://elsewhere?/v1/chat/completions", 404),
        ("/v1/caf\xe9", 400),
    ],
)
def test_the_gateway_and_a_worker_read_paths_alike(
    spelling: str, status: int, before_one: GatewayProcess, shared_server: Server
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()
    head = f"host: h\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    raw = f"POST {spelling} HTTP/1.1\r\n{head}".encode("latin-1") + body
    for port in (before_one.port, shared_server.port):
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
            connection.sendall(raw)
            assert connection.makefile("rb").readline().split()[1] == str(status).encode(), port


def test_a_stopped_or_killed_worker_is_out_and_its_streams_end_in_errors(mortal: Server) -> None:
    """With the default settings."""
    with GatewayProcess("--worker", mortal.url) as gateway:
        gateway.wait_up(1)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            out: list[bytes] = []
            began = threading.Event()
            reader = threading.Thread(target=stream, args=(gateway.port, out, began, ENDLESS))
            reader.start()
            assert began.wait(PATIENCE_S)
            os.kill(mortal.apis[0].pid, number)
            reader.join(PATIENCE_S)
            last = events(out[0])[-1]
            assert last["error"]["code"] == "worker_lost"
            assert b'finish_reason":"' not in out[0]
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
        # One that ended leaves the gateway idle, until the next one comes.
        assert gateway.ask("POST", "/v1/completions", LONG | {"max_tokens": 1})[0] == 200
        out: list[bytes] = []
        began = threading.Event()
        reader = threading.Thread(target=stream, args=(gateway.port, out, began))
        reader.start()
        assert began.wait(PATIENCE_S)
        gateway.process.send_signal(signal.SIGTERM)
        reader.join(PATIENCE_S)
        assert events(out[0])[-1] == "[DONE]"
        assert gateway.process.wait(PATIENCE_S) == 0


class Load:
    """Threads that ask again and again on new connections, and count what they were told."""

    def __init__(self, port: int, threads: int) -> None:
        self._port = port
        self._done = threading.Event()
        self.answers: list[int] = []
        self.lost: list[BaseException] = []  # a request that was taken and got no whole answer
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._done.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
            try:
                connection.request("POST", "/v1/completions", json.dumps(LONG | {"max_tokens": 20}))
                answer = connection.getresponse()
            except ConnectionError:  # nobody took it: it may be asked again
                connection.close()
                time.sleep(0.002)
                continue
            try:
                whole = answer.read()
                assert answer.status == 503 or events(whole)[-1] == "[DONE]", whole
                self.answers.append(answer.status)
            except (http.client.HTTPException, OSError, AssertionError) as error:
                self.lost.append(error)
            finally:
                connection.close()

    def wait(self, more: int) -> None:
        """Until so many more were answered well."""
        goal, deadline_s = self.answers.count(200) + more, time.monotonic() + PATIENCE_S
        while self.answers.count(200) < goal:
            assert not self.lost, self.lost
            assert time.monotonic() < deadline_s, self.answers
            time.sleep(0.01)


def test_a_gateway_that_is_restarted_under_load_loses_no_request(shared_server: Server) -> None:
    """One ends what it has; the next listens on its port. In between, connects are refused."""
    with kept_ports() as port:
        serve_twice(shared_server, port)


def serve_twice(shared_server: Server, port: int) -> None:
    with Load(port, 4) as load:
        with GatewayProcess("--worker", shared_server.url, port=port) as first:
            first.wait_up(1)
            load.wait(20)
        with GatewayProcess("--worker", shared_server.url, port=port) as second:
            second.wait_up(1)
            load.wait(20)
    assert not load.lost, load.lost


def test_of_several_processes_one_is_killed_and_another_takes_its_place(mortal: Server) -> None:
    with GatewayProcess("--worker", mortal.url, "--processes", "2") as gateway:
        gateway.wait_up(1)

        def running() -> set[int]:
            found = set()
            for child in psutil.Process(gateway.process.pid).children():
                with suppress(psutil.NoSuchProcess):  # a zombie, or gone meanwhile
                    if any("spawn_main" in part for part in child.cmdline()):
                        found.add(child.pid)
            return found

        before = running()
        assert len(before) == 2
        outs: list[list[bytes]] = [[] for _ in range(12)]
        begins = [threading.Event() for _ in outs]
        readers = [
            threading.Thread(target=stream, args=(gateway.port, out, begin))
            for out, begin in zip(outs, begins, strict=True)
        ]
        for reader in readers:
            reader.start()
        for begin in begins:
            assert begin.wait(PATIENCE_S)
        os.kill(min(before), signal.SIGKILL)
        with Load(gateway.port, 2) as load:
            load.wait(10)  # the other serves on
        assert not load.lost, load.lost
        for reader in readers:
            reader.join(PATIENCE_S)
        for (whole,) in outs:  # to its end, or cut without one: none is made up
            assert events(whole)[-1] == "[DONE]" or b'finish_reason":"' not in whole
        deadline_s = time.monotonic() + PATIENCE_S
        while len(running()) < 2 or gateway.workers()[mortal.url]["requests"]:
            assert time.monotonic() < deadline_s, (running(), gateway.said)
            time.sleep(0.05)
        assert max(before) in running()
        mortal.wait_idle()  # the worker was told that the killed one's clients are gone


def test_limits_of_several_processes_need_a_place(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[tiers.default]\nparallel = 1\n")
    command = [sys.executable, "-m", "headrace.cli.main", "gateway", "--config", str(file)]
    ran = subprocess.run(
        [*command, "--processes", "2"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert ran.returncode
    assert "redis_url" in ran.stderr

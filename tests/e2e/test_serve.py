"""`headrace serve` as a whole: start, answer, drain, die, restart, leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.runtime_folder import runtime_folder
from tests.e2e.serve_process import ServeProcess, children

FAKE = ("--backend", "fake")
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def eventually(true: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def all_gone(pids: list[int]) -> None:
    eventually(lambda: not [pid for pid in pids if alive(pid)], "the processes are gone")


class Stream(threading.Thread):
    """Reads one streamed answer to its end and keeps its lines."""

    def __init__(self, server: ServeProcess, **fields: object) -> None:
        super().__init__(daemon=True)
        body = {**CHAT, "stream": True, **fields}
        self.request = urllib.request.Request(
            server.url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self.request, timeout=120) as answer:
            for raw in answer:
                self.lines.append(raw.decode().rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def test_starts_answers_and_stops_clean() -> None:
    with ServeProcess(*FAKE) as server:
        assert "try: curl http://127.0.0.1" in server.said
        assert server.get("/health")[0] == 200
        assert server.get("/ready")[0] == 200
        status, answer = server.post("/v1/chat/completions", CHAT)
        assert status == 200
        assert answer["usage"]["completion_tokens"] >= 1
        pids = list(server.children.values())
        assert len(pids) >= 2
        assert server.stop() == 0
    assert "stopped" in server.said
    all_gone(pids)


def test_sigterm_lets_streams_finish() -> None:
    with ServeProcess(*FAKE, "--fake-step-ms", "20") as server:
        streams = [Stream(server, max_tokens=60, ignore_eos=True) for _ in range(20)]
        eventually(lambda: all(len(s.lines) > 4 for s in streams), "all streams have begun")
        assert server.stop() == 0
        for stream in streams:
            stream.join(30)
            assert stream.lines[-2:] == ["data: [DONE]", ""] or "[DONE]" in stream.lines[-1]
            assert '"finish_reason":"length"' in stream.text


def test_sigterm_ends_streams_that_outlast_the_deadline() -> None:
    arguments = (*FAKE, "--fake-step-ms", "50", "--shutdown-timeout-s", "1")
    with ServeProcess(*arguments) as server:
        stream = Stream(server, max_tokens=4000, ignore_eos=True)
        eventually(lambda: len(stream.lines) > 4, "the stream has begun")
        assert server.stop() == 0
        stream.join(30)
        assert '"error"' in stream.text
        assert "shutting_down" in stream.text


def test_a_dead_engine_ends_streams_and_the_server() -> None:
    with ServeProcess(*FAKE, "--fake-step-ms", "50") as server:
        pids = list(server.children.values())
        stream = Stream(server, max_tokens=4000, ignore_eos=True)
        eventually(lambda: len(stream.lines) > 4, "the stream has begun")
        os.kill(server.children["headrace-engine"], signal.SIGKILL)
        assert server.end() == 3
        stream.join(30)
        assert "engine_dead" in stream.text
        assert "the engine process died (signal SIGKILL)" in server.said
        all_gone(pids)


def test_restart_brings_a_new_engine() -> None:
    with ServeProcess(*FAKE, "--restart", "--fake-step-ms", "50") as server:
        stream = Stream(server, max_tokens=4000, ignore_eos=True)
        eventually(lambda: len(stream.lines) > 4, "the stream has begun")
        old = server.children["headrace-engine"]
        os.kill(old, signal.SIGKILL)
        stream.join(30)
        assert "engine_dead" in stream.text
        eventually(lambda: server.said.count("ready in") == 2, "it says so when it is back")
        assert server.children["headrace-engine"] != old
        assert server.post("/v1/chat/completions", CHAT)[0] == 200


def test_a_stopped_engine_is_seen() -> None:
    """B082: a process that is there but does nothing."""
    with ServeProcess(*FAKE, "--fake-step-ms", "20", "--engine-timeout-s", "2") as server:
        stream = Stream(server, max_tokens=4000, ignore_eos=True)
        eventually(lambda: len(stream.lines) > 4, "the stream has begun")
        engine = server.children["headrace-engine"]
        os.kill(engine, signal.SIGSTOP)
        eventually(lambda: server.get("/health")[0] == 503, "/health fails")
        stream.join(30)
        assert "engine_dead" in stream.text
        os.kill(engine, signal.SIGCONT)
        eventually(lambda: server.get("/ready")[0] == 200, "/ready is back")
        assert server.post("/v1/chat/completions", CHAT)[0] == 200


def test_a_dead_http_process_is_replaced() -> None:
    with ServeProcess(*FAKE, "--api-workers", "2") as server:
        os.kill(server.children["headrace-api-0"], signal.SIGKILL)
        eventually(lambda: "starting it again" in server.said, "the supervisor says so")
        eventually(lambda: "headrace-api-0" in server.children, "it is back")
        for _ in range(20):
            assert server.post("/v1/chat/completions", CHAT)[0] == 200


def test_nothing_survives_a_killed_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes end with it; its folder goes when the next server starts."""
    with ServeProcess(*FAKE, TMPDIR=str(tmp_path)) as server:
        pids = list(server.children.values())
        (folder,) = tmp_path.glob("headrace-*")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with runtime_folder():
            assert folder.exists(), "it is in use"
        server.process.kill()
        server.process.wait()
        all_gone(pids)
        assert folder.exists(), "nobody is there who could remove it"
        with runtime_folder() as mine:
            assert [*tmp_path.glob("headrace-*")] == [mine]


@pytest.mark.parametrize("signals", [1, 2])
def test_stops_clean_when_nobody_reads_what_it_says(signals: int) -> None:
    """The terminal, or the program that started it, is gone: a broken pipe stops no stop."""
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--port", "0", *FAKE]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    while "ready in" not in process.stderr.readline():
        assert process.poll() is None
    pids = children(process.pid)
    process.stderr.close()
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    all_gone(list(pids.values()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "fake", "--kv-blocks", "8", "--kv-memory", "1GiB"), "exclude each other"),
        (("/no/such/model.gguf",), "/no/such/model.gguf"),
        (("--backend", "cuda"), "backend = 'cuda': "),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "8"), "below max_num_seqs"),
    ],
)
def test_what_cannot_start_says_why(arguments: tuple[str, ...], words: str) -> None:
    with ServeProcess(*arguments, wait=False) as server:
        assert server.end() == 2
    assert words in server.said
    assert "Traceback" not in server.said


def test_a_taken_port_is_an_error() -> None:
    with ServeProcess(*FAKE) as first:
        port = int(first.url.rsplit(":", 1)[1])
        with ServeProcess(*FAKE, port=port, wait=False) as second:
            assert second.end() == 2
        assert "cannot listen" in second.said

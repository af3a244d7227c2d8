"""The examples, and `headrace chat` with a server of its own, as a user runs them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from headrace.cli.child_server import ChildServer
from headrace.errors import SetupError

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# Greedy, so that an answer depends on nothing but its prompt; with the penalty none ends at once.
DRAWS = "temperature=0,repetition_penalty=1.3"
FAKE = {"HEADRACE_BACKEND": "fake", "HEADRACE_DEFAULT_SAMPLING": DRAWS}


def run(*command: str) -> str:
    environment = {**os.environ, **FAKE, "PYTHONPATH": str(ROOT)}  # installed or not
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[ChildServer]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FAKE.items():
            patch.setenv(name, value)
        with ChildServer([], lambda line: None) as child:
            yield child


def test_offline() -> None:
    lines = run(sys.executable, str(EXAMPLES / "offline.py")).splitlines()
    assert lines[0].startswith("0: '")
    assert lines[1].startswith("1: '")
    assert lines[2].strip()


def test_openai_client(server: ChildServer) -> None:
    out = run(sys.executable, str(EXAMPLES / "openai_client.py"), server.url + "/v1")
    answer, counts = out.rstrip().rsplit("\n", 1)
    assert answer.strip()
    assert counts.endswith("tokens")


def test_anthropic_client(server: ChildServer) -> None:
    out = run(sys.executable, str(EXAMPLES / "anthropic_client.py"), server.url)
    answer, counts = out.rstrip().rsplit("\n", 1)
    assert answer.strip()
    assert counts.endswith("tokens")


def test_websocket_client(server: ChildServer) -> None:
    url = server.url.replace("http://", "ws://")
    lines = run(sys.executable, str(EXAMPLES / "websocket_client.py"), url).splitlines()
    assert [line[:4] for line in lines] == ["a: '", "b: '"]
    assert all(len(line) > 10 for line in lines)


def test_curl(server: ChildServer) -> None:
    lines = run("bash", str(EXAMPLES / "curl.sh"), server.url).splitlines()
    answer = next(json.loads(line) for line in lines if "chat.completion" in line)
    assert answer["choices"][0]["message"]["content"]
    assert "data: [DONE]" in lines


def test_chat_with_a_running_server(server: ChildServer) -> None:
    chat = [sys.executable, "-m", "headrace.cli.main", "chat"]
    out = run(*chat, "--url", server.url, "--temperature", "0", "--max-tokens", "9", "Hello")
    assert out.strip()
    assert (
        run(*chat, "--url", server.url, "--temperature", "0", "--max-tokens", "9", "Hello") == out
    )


def test_chat_starts_a_server_and_leaves_none_behind() -> None:
    out = run(sys.executable, "-m", "headrace.cli.main", "chat", "--max-tokens", "9", "Hello")
    assert out.strip()


def ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


def test_the_server_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FAKE.items():
        monkeypatch.setenv(name, value)
    child = ChildServer([], lambda line: None)
    tree = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    assert len(tree) >= 3
    assert child.stop() == 0
    assert ended(tree)


def test_the_server_ends_when_its_owner_is_killed() -> None:
    code = (
        "import time; from headrace.cli.child_server import ChildServer\n"
        "print(ChildServer([], lambda line: None).pid, flush=True); time.sleep(300)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **FAKE}, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert ended(tree)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(SetupError, match="did not start"):
        ChildServer([str(tmp_path / "no-model.gguf")], said.append)
    assert any("no-model.gguf" in line for line in said)


def test_ctrl_c_in_the_terminal_stops_the_answer_and_not_the_chat() -> None:
    """A real terminal (a pty), a slow server, SIGINT halfway through the answer."""
    ours, theirs = pty.openpty()
    slow = {**os.environ, **FAKE, "HEADRACE_FAKE_STEP_MS": "30"}
    chat = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "headrace.cli.main",
            "chat",
            "--max-tokens",
            "4000",
            "--temperature",
            "0",
        ],
        env=slow,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell starts background jobs with SIGINT ignored, and a terminal does not.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    assert chat.stderr is not None
    try:
        expect(ours, rb"> ")
        os.write(ours, b"Hello\n")
        expect(ours, rb"Hello\r\n")
        expect(ours, rb"[a-z]{3}")  # letters of the answer, not of a terminal's escape sequence
        chat.send_signal(signal.SIGINT)
        expect(ours, rb"\(stopped\)")
        os.write(ours, b"/reset\n")
        expect(ours, rb"\(forgotten\)")
        os.write(ours, b"/exit\n")
        assert chat.wait(60) == 0
    finally:
        chat.kill()
        chat.wait()
        chat.stderr.close()
        os.close(ours)


def expect(terminal: int, pattern: bytes) -> None:
    """Read until `pattern` has come."""
    seen = b""
    deadline = time.monotonic() + 60
    while not re.search(pattern, seen):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{pattern!r} did not come after {seen[-300:]!r}"
        seen += os.read(terminal, 4096)

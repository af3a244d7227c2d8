"""`headrace up` as its users start it: two replicas of the fake model behind one gateway."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import PATIENCE_S, kept_ports

ROOT = Path(__file__).resolve().parents[2]
UP = [sys.executable, "-W", "error", "-m", "headrace.cli.main", "up"]


def asked(url: str, path: str) -> Any:
    request = urllib.request.Request(f"{url}{path}", headers={"authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def predicted(url: str, client: openai.OpenAI) -> dict[str, Any]:
    """What was predicted of a prompt that a replica has computed, beside what was found."""
    prompt = "which replica has this? " * 20
    client.completions.create(model="fake", prompt=prompt, max_tokens=1)
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        rows = asked(url, "/gateway/workers")["workers"]
        events = [row["kv_events"] for row in rows if row["kv_events"]]
        if {e["state"] for e in events} == {"exact"} and any(e["blocks"] > 20 for e in events):
            break
        assert time.monotonic() < deadline_s, rows
        time.sleep(0.05)
    answer = client.completions.with_raw_response.create(model="fake", prompt=prompt, max_tokens=1)
    told = asked(url, f"/gateway/decisions/{answer.headers['x-request-id']}")
    compared: dict[str, Any] = told["cached_tokens"]
    return compared


@pytest.fixture
def port() -> Iterator[int]:
    """The first of two."""
    with kept_ports(2) as first:
        yield first


def test_two_replicas_behind_one_address(tmp_path: Path, port: int) -> None:
    """The key of `--api-key` is the gateway's; both replicas answer, each publishes its events at a
    port of its own, where the gateway hears them; SIGTERM ends all of it."""
    log = tmp_path / "usage.jsonl"
    args = ["--replicas", "2", "--backend", "fake", "--port", "0", "--usage-log", str(log)]
    args += ["--kv-events-endpoint", f"tcp://*:{port}"]
    process = subprocess.Popen(
        [*UP, *args, "--api-key", "secret"], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stderr is not None
    said: list[str] = []
    cut = threading.Timer(4 * PATIENCE_S, process.kill)
    cut.start()
    try:
        url = ""
        while not url and (line := process.stderr.readline()):
            said.append(line)
            if found := re.search(r"^ready in [\d.]+ s: (http://\S+), 2 replicas$", line):
                url = found[1]
        assert url, said
        assert f"look: {url}/gateway/ui\n" in said
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        with client, pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            for i in range(4):
                answer = client.completions.create(
                    model="fake", prompt=f"{i} x", max_tokens=3, extra_body={"ignore_eos": True}
                )
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 3
            compared = predicted(url, client)
            assert compared["index"] == "exact"
            assert compared["predicted"] == compared["confirmed"] > 400
        process.send_signal(signal.SIGTERM)
        said += process.stderr.read().splitlines(keepends=True)
        assert process.wait(2 * PATIENCE_S) == 0, said
    finally:
        cut.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
    text = "".join(said)
    assert text.count("| stopped") == 2
    assert "secret" not in text
    logs = [tmp_path / f"usage.{i}.jsonl" for i in range(2)]
    assert sum(len(file.read_text().splitlines()) for file in logs) == 6, "a log each"


def test_what_cannot_be_is_said_before_anything_starts() -> None:
    done = subprocess.run(
        [*UP, "--backend", "fake", "--fleet", "/no/such.toml"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert "/no/such.toml cannot be read" in done.stderr

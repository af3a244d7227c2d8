"""Fifteen streams and a client that makes every known mistake: the fifteen never notice."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.faults import CHAT, GROUPS, TEXT, Fault, raw
from tests.e2e.serve_process import ServeProcess
from tests.e2e.serving import Server, events


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def streams(tokens: int, *, exact: bool) -> list[tuple[str, dict[str, Any]]]:
    """Fifteen of many kinds. exact: what is said beside the text must not change either."""
    fixed = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"n": 2}, {"stop": ["zq", "qz"]}, {"min_p": 0.2, "top_k": 40},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2}, {"logit_bias": {"65": 2}},
        {"stream_options": {"include_usage": exact}},
        {"structured_outputs": {"regex": "[a-f]{4,400}"}},
        {"typical_p": 0.9, "dry_multiplier": 0.8},
    ]  # fmt: skip
    asked = [
        (CHAT, {"messages": user(f"Tell me about {at}."), **fixed, "seed": at, **kind})
        for at, kind in enumerate(kinds)
    ]
    asked += [
        (TEXT, {"prompt": ["One", "Two"], **fixed, "seed": 1}),
        (TEXT, {"prompt": list(range(40, 80)), **fixed, "seed": 2, "echo": True}),
        (TEXT, {"prompt": "Once upon a time " * 10, **fixed, "temperature": 0}),
        (TEXT, {"prompt": "Once upon a time " * 10, **fixed, "temperature": 0, "cache_salt": "s"}),
        (TEXT, {"prompt": "Numbers", **fixed, "seed": 3, **({"logprobs": 3} if exact else {})}),
    ]
    assert len(asked) == 15
    return asked


class Stream(threading.Thread):
    """Reads one stream to its end. `begun` once its first bytes came."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._port, self._path, self._body = port, path, body
        self.begun = threading.Event()
        self.data = b""

    def run(self) -> None:
        try:
            _, self.data = send(self._port, Fault("", self._path, self._body, ()), self.begun)
        finally:
            self.begun.set()


def send(port: int, fault: Fault, begun: threading.Event | None = None) -> tuple[int, bytes]:
    """Status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json", **dict(fault.headers)}
        connection.request("POST", fault.path, raw(fault), headers)
        response = connection.getresponse()
        if begun is not None:
            begun.set()
        return response.status, response.read()
    finally:
        connection.close()


def run(
    port: int, asked: Sequence[tuple[str, Any]], faults: Sequence[Fault] = ()
) -> list[dict[str, Any]]:
    """What each stream said; the faults come once all of them run."""
    threads = [Stream(port, *one) for one in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        assert thread.begun.wait(60)
    for fault in faults:
        status, answer = send(port, fault)
        assert status in fault.right, (fault.name, str(fault.body)[:200], status, answer[:500])
        if status != 200:
            error = json.loads(answer)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"], fault.name
    for thread in threads:
        thread.join()
    return [content_of(thread.data) for thread in threads]


def content_of(data: bytes) -> dict[str, Any]:
    """All that a stream says; how it is cut into chunks is a matter of time."""
    *chunks, done = events(data)
    assert done == "[DONE]"
    said: dict[str, Any] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        if chunk.get("usage"):
            said["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            own = said.setdefault(f"{choice['index']}", {"text": "", "ends": [], "tokens": []})
            own["text"] += choice.get("text") or choice.get("delta", {}).get("content", "")
            if choice["finish_reason"]:
                own["ends"].append((choice["finish_reason"], choice["stop_reason"]))
            if choice.get("logprobs"):
                own["tokens"] += choice["logprobs"]["token_logprobs"]
    assert all(len(own["ends"]) == 1 for name, own in said.items() if name != "usage")
    return said


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(fake_step_ms=4.0, max_num_seqs=32, max_model_len=1024) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server: Server) -> list[dict[str, Any]]:
    run(server.port, streams(100, exact=True))  # fills the prefix cache
    return run(server.port, streams(100, exact=True))


@pytest.mark.parametrize("group", GROUPS)
def test_fifteen_streams_beside_a_group_of_faults(
    server: Server, alone: list[dict[str, Any]], group: str
) -> None:
    beside = run(server.port, streams(100, exact=True), GROUPS[group])
    for one, other in zip(beside, alone, strict=True):
        assert one == other
    server.wait_idle()


@pytest.mark.model
def test_fifteen_streams_of_the_real_model_beside_some_of_each_group() -> None:
    options = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "32")
    with ServeProcess(*options, "--api-workers", "1", "--kv-memory", "512MiB") as server:
        port = urlsplit(server.url).port
        assert port is not None
        asked = streams(4, exact=False)
        alone = run(port, asked)
        some = [fault for group in GROUPS.values() for fault in group[::6]]
        for one, other in zip(run(port, asked, some), alone, strict=True):
            assert one == other

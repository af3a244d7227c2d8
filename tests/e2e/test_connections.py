"""Raw sockets: clients that leave at every stage, read slowly, or speak no HTTP."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.e2e.serving import PATIENCE_S, Server

TEXT = "/v1/completions"
LONG = {"prompt": "go on", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        fake_step_ms=3.0,
        max_num_seqs=4,
        max_queue=2,
        max_num_batched_tokens=64,
        keepalive_s=0.4,
        stall_timeout_s=1.5,
    ) as running:
        yield running


OPENED: list[socket.socket] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    """So that one failed test does not hold rows that the next one waits for."""
    yield
    while OPENED:
        OPENED.pop().close()


def open_socket(server: Server, receive_bytes: int = 0) -> socket.socket:
    sock = socket.socket()
    OPENED.append(sock)
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(PATIENCE_S)
    sock.connect(("127.0.0.1", server.port))
    return sock


def send(server: Server, body: dict[str, Any], receive_bytes: int = 0) -> socket.socket:
    sock = open_socket(server, receive_bytes)
    raw = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(raw) + raw)
    return sock


def read_until(sock: socket.socket, mark: bytes, times: int = 1) -> bytes:
    seen = b""
    while seen.count(mark) < times:
        data = sock.recv(65536)
        assert data, f"closed before {mark!r}: {seen[-300:]!r}"
        seen += data
    return seen


def reset(sock: socket.socket) -> None:
    """Close with RST, as a killed client or a broken network does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def aborts(server: Server) -> float:
    return server.metric("headrace_requests_finished_total", reason="abort")


def running(server: Server) -> float:
    return server.metric("headrace_requests_running")


def taken(server: Server, rows: int) -> bool:
    return running(server) == rows


def fill_rows(server: Server) -> list[socket.socket]:
    """Four long requests, one after the other: a burst would overflow the queue of two."""
    crowd = []
    for row in range(1, 5):
        crowd.append(send(server, LONG))
        server.wait(partial(taken, server, row), "a row taken")
    return crowd


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("stage", ["streaming", "before the first token", "whole", "queued"])
def test_leaving_aborts(server: Server, stage: str, hard: bool) -> None:
    """B076, B077."""
    server.wait_idle()
    before = aborts(server)
    crowd = fill_rows(server) if stage == "queued" else []
    body = {**LONG, "stream": stage != "whole"}
    if stage == "before the first token":
        body |= {"prompt": "x" * 900, "max_tokens": 3000}  # many chunks of 64
    sock = send(server, body)
    if stage == "streaming":
        read_until(sock, b"data: ", 5)
    elif stage == "queued":
        server.wait(lambda: server.metric("headrace_requests_waiting") == 1, "queued")
    else:
        server.wait(lambda: running(server) == 1, "running")
    reset(sock) if hard else sock.close()
    server.wait(lambda: aborts(server) == before + 1, "the abort")
    for other in crowd:
        other.close()
    server.wait_idle()
    assert aborts(server) == before + 1 + len(crowd)


def test_leaving_while_sending_the_body(server: Server) -> None:
    gone = partial(server.metric, "headrace_requests_total", endpoint=TEXT, status="499")
    before = gone()
    sock = open_socket(server)
    sock.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{{".encode())
    sock.close()
    server.wait(lambda: gone() > before, "499")
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_is_a_503_with_its_own_status(server: Server, streamed: bool) -> None:
    server.wait_idle()
    crowd = fill_rows(server) + [send(server, LONG) for _ in range(2)]
    server.wait(lambda: server.metric("headrace_requests_waiting") == 2, "a full queue")
    status, headers, raw = server.request("POST", TEXT, {**LONG, "stream": streamed})
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(raw)["error"]["code"] == "queue_full"
    for sock in crowd:
        sock.close()
    server.wait_idle()


def test_silence_is_filled_with_comments(server: Server) -> None:
    server.wait_idle()
    crowd = fill_rows(server)
    waiting = send(server, {"prompt": "wait", "max_tokens": 3, "stream": True})
    head = read_until(waiting, b": keep-alive\n\n", 2)  # queued: headers and comments, no data
    assert b"200 OK" in head
    assert b"text/event-stream" in head
    assert b"data:" not in head
    for sock in crowd:
        sock.close()
    rest = read_until(waiting, b"data: [DONE]\n\n")
    assert b'"finish_reason":"' in rest
    waiting.close()


def test_a_client_that_reads_nothing_is_cut_and_others_are_not_held_up(server: Server) -> None:
    """B083."""
    server.wait_idle()
    before = aborts(server)
    # With what is said of each token it is as large however the events are cut.
    fat = {**LONG, "n": 3, "stream": True, "logprobs": 5}
    stuck = send(server, fat, receive_bytes=4096)
    read_until(stuck, b"data: ")
    quick = send(server, {"prompt": "quick", "max_tokens": 100, "stream": True})
    read_until(quick, b"data: [DONE]")
    quick.close()
    server.wait(lambda: aborts(server) == before + 1, "the slow client's abort")
    with pytest.raises(ConnectionError):  # reset, not a tidy end
        read_until(stuck, b"data: [DONE]")
    server.wait_idle()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"\x00" * 1000,
    ],
)
def test_what_is_not_http(server: Server, raw: bytes) -> None:
    sock = open_socket(server)
    sock.sendall(raw)
    answer = b""
    try:
        while data := sock.recv(65536):
            answer += data
    except ConnectionError:
        pass
    sock.close()
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")) or answer == b""
    assert server.get("/health")[0] == 200


def test_an_endless_body_is_refused(server: Server) -> None:
    sock = open_socket(server)
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    sock.sendall(head.encode())
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    stop = threading.Event()

    def pour() -> None:
        while not stop.is_set():
            try:
                sock.sendall(chunk)
            except OSError:
                return

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 413")
    finally:
        stop.set()
        sock.close()
        thread.join()


def test_a_connection_serves_many_requests(server: Server) -> None:
    sock = open_socket(server)
    body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for _ in range(3):
        sock.sendall(head + body)
        assert read_until(sock, b"0\r\n\r\n").startswith(b"HTTP/1.1 200")
    sock.close()

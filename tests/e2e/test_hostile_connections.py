"""Raw sockets that keep to the letter of HTTP less and less, and clients with all the time."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.e2e.serving import PATIENCE_S, Server

TEXT = "/v1/completions"
SHORT = {"prompt": "x", "max_tokens": 3, "seed": 1}
LONG = {"prompt": "go on", "max_tokens": 3000, "ignore_eos": True}
H2C = (
    "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(fake_step_ms=5.0) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    """One that waits for no client: for those alone whom it need not wait for."""
    with Server(receive_timeout_s=2.0, stall_timeout_s=1.5) as running:
        yield running
        running.wait_idle()


@pytest.fixture
def sock(server: Server) -> Iterator[socket.socket]:
    with connect(server) as made:
        yield made


@pytest.fixture
def late(hasty: Server) -> Iterator[socket.socket]:
    """Of one who keeps that server waiting."""
    with connect(hasty) as made:
        yield made


def connect(server: Server, receive_bytes: int = 0) -> socket.socket:
    made = socket.socket()
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.settimeout(PATIENCE_S)
    made.connect(("127.0.0.1", server.port))
    return made


def post(body: Any, headers: str = "", version: str = "1.1", path: str = TEXT) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


def read_all(sock: socket.socket) -> bytes:
    """To the end of the connection, tidy or not."""
    seen = b""
    try:
        while data := sock.recv(65536):
            seen += data
    except ConnectionError:
        pass
    return seen


def send_slowly(sock: socket.socket, pieces: list[bytes], pause_s: float) -> None:
    for piece in pieces:
        sock.sendall(piece)
        time.sleep(pause_s)


def split(answer: bytes) -> tuple[int, bytes, bytes]:
    """Status, head in lower case, and all that follows it."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), rest


@pytest.mark.parametrize(
    "raw",
    [b"GET /hea", post(SHORT)[:-5], b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\n"],
)
def test_a_request_that_stays_unfinished_is_a_408(late: socket.socket, raw: bytes) -> None:
    start_s = time.monotonic()
    late.sendall(raw)
    status, _, body = split(read_all(late))
    assert status == 408
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert time.monotonic() - start_s > 0.5


def test_a_byte_now_and_then_does_not_buy_time(late: socket.socket) -> None:
    raw = post({**SHORT, "user": "u" * 400})
    with pytest.raises(ConnectionError):  # before all of it was sent
        send_slowly(late, [bytes([byte]) for byte in raw], 0.05)


def test_a_connection_that_asks_nothing_is_closed_in_silence(late: socket.socket) -> None:
    assert read_all(late) == b""


def test_a_body_that_the_route_does_not_read_does_not_hold_the_connection(
    late: socket.socket,
) -> None:
    late.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nx")
    assert split(read_all(late))[0] == 200


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n"])
def test_a_head_without_end_is_cut(server: Server, sock: socket.socket, start: bytes) -> None:
    more = b"y" * 65536 if start != b"GET / HTTP/1.1\r\n" else b"x: y\r\n" * 10_000
    with pytest.raises(ConnectionError):
        send_slowly(sock, [start, *[more] * 1000], 0)
    assert server.get("/health")[0] == 200


def test_a_whole_answer_that_nobody_reads_is_dropped(hasty: Server) -> None:
    """The last send of an answer returns before its bytes have left."""
    with connect(hasty, receive_bytes=4096) as sock:
        # 2.4 MB for one: where sending takes long, it is cut for that.
        sock.sendall(post({"tokens": [257] * 200_000}, path="/detokenize"))
        hasty.wait(lambda: "took none of its last" in hasty.log_path.read_text(), "the cut")
        assert len(read_all(sock)) < 1_000_000


@pytest.mark.parametrize("streamed", [False, True])
def test_b076_leaving_with_a_second_request_in_line(server: Server, streamed: bool) -> None:
    server.wait_idle()
    aborted = partial(server.metric, "headrace_requests_finished_total", reason="abort")
    before = aborted()
    sock = connect(server)
    sock.sendall(post({**LONG, "stream": streamed}) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    server.wait(lambda: server.metric("headrace_requests_running") == 1, "running")
    sock.close()
    server.wait_idle()
    assert aborted() == before + 1, "it ran to its end for nobody"


def test_a_short_pipeline_is_answered_in_order(server: Server, sock: socket.socket) -> None:
    ask = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    sock.sendall(post({**SHORT, "stream": True}) + ask * 3 + last)
    parts = read_all(sock).split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert len(parts) == 5
    assert b"data: [DONE]" in parts[0]
    assert all(b'"version"' in part for part in parts[1:4])
    assert b'"status"' in parts[4]


def test_a_pipeline_without_end_is_not_kept(server: Server, sock: socket.socket) -> None:
    body = {**LONG, "max_tokens": 200}
    sock.sendall(post(body) + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
    answer = read_all(sock)
    assert 1 <= answer.count(b"HTTP/1.1 200 OK") <= 66
    assert b'"completion_tokens":200' in answer


@pytest.mark.parametrize("streamed", [False, True])
def test_garbage_behind_a_request_does_not_get_into_its_answer(
    server: Server, sock: socket.socket, streamed: bool
) -> None:
    sock.sendall(post({**LONG, "max_tokens": 100, "stream": streamed}) + b"\0garbage\r\n\r\n")
    answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if streamed else b"}")


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00", b"GET /\xff HTTP/1.1\r\n\r\n"])
def test_b047_what_is_not_http_gets_an_error_in_the_same_shape(
    server: Server, sock: socket.socket, raw: bytes
) -> None:
    sock.sendall(raw)
    status, head, body = split(read_all(sock))
    assert status == 400
    assert b"application/json" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_an_http_1_0_client_gets_no_chunks(server: Server) -> None:
    def ask(version: str, streamed: bool) -> tuple[int, bytes, bytes]:
        with connect(server) as sock:
            sock.sendall(post({**SHORT, "stream": streamed}, "connection: close\r\n", version))
            return split(read_all(sock))

    status, head, body = ask("1.0", True)
    assert status == 200
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    text = json.loads(ask("1.0", False)[2])["choices"][0]["text"]
    chunks = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


@pytest.mark.parametrize("cut", [1, 40, 150, 10_000])
def test_an_offer_to_upgrade_is_declined_and_the_body_is_read(
    server: Server, sock: socket.socket, cut: int
) -> None:
    """Java's HttpClient offers h2c with every request."""
    raw = post(SHORT, H2C)
    for start in range(0, len(raw), cut):
        sock.sendall(raw[start : start + cut])
    sock.sendall(post(SHORT, "connection: close\r\n"))
    answers = read_all(sock).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200"]
    bodies = [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers]
    assert bodies[0]["choices"] == bodies[1]["choices"]


def test_methods_that_no_route_takes(server: Server, sock: socket.socket) -> None:
    status, headers, _ = server.request("OPTIONS", TEXT)
    assert (status, headers["allow"]) == (405, "POST")
    status, headers, raw = server.request("HEAD", "/health")
    assert (status, raw) == (200, b"")
    assert int(headers["content-length"]) > 0
    sock.sendall(b"CONNECT example.org:80 HTTP/1.1\r\nhost: x\r\n\r\n")
    assert split(read_all(sock))[0] == 405

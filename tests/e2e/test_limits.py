"""What an operator may limit: who comes in, how many at once, for how long, and from which page."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.e2e.serving import Server, events
from tests.e2e.test_raw_bodies import LEGAL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PAGE = "https://page.example"
HASHED = f"sha256:{hashlib.sha256(b'kept-as-a-digest').hexdigest()}"
KEY = {"x-api-key": "kept-as-a-digest"}
LONG = {"prompt": "secret words", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        workers=2, fake_step_ms=10.0, max_num_seqs=3, max_streams=3, max_n=2, max_schema_bytes=100,
        strict=True, cors_origin=(PAGE,), api_key=("plain", HASHED),
    ) as running:  # fmt: skip
        yield running


class Open:
    """A stream that has begun and is read later."""

    def __init__(self, server: Server, rows: int = 1) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        head = {"content-type": "application/json", **KEY}
        body = json.dumps({**LONG, "prompt": ["secret"] * rows, "stream": True}).encode()
        self._connection.request("POST", TEXT, body, head)
        self._response: http.client.HTTPResponse | None = None

    def status(self) -> int:
        """Once its first token has come, or its refusal."""
        self._response = self._connection.getresponse()
        return self._response.status

    def rest(self) -> bytes:
        """The body, when all of it came."""
        response = self._response or self._connection.getresponse()
        try:
            return response.read()
        finally:
            self.leave()

    def leave(self) -> None:
        """Close the connection."""
        self._connection.close()
        if self._response is not None:
            self._response.close()


def error_of(raw: bytes) -> dict[str, Any]:
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def wait_idle(server: Server) -> None:
    """As `Server.wait_idle`, with a key."""
    gauges = ("headrace_requests_running", "headrace_requests_waiting", "headrace_kv_blocks_used")

    def idle() -> bool:
        lines = server.request("GET", "/metrics", headers=KEY)[2].decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(gauges)]
        assert len(values) >= 3
        return not any(values)

    server.wait(idle, "idle gauges")


def test_every_path_but_the_probes_needs_a_key(server: Server) -> None:
    for path in ("/health", "/ready"):
        assert server.request("GET", path)[0] == 200
    for method, path in (
        ("GET", "/metrics"), ("GET", "/version"), ("GET", "/v1/models"), ("POST", CHAT),
        ("POST", "/tokenize"), ("GET", "/nowhere"), ("OPTIONS", TEXT), ("GET", "/health/"),
        ("GET", "//health"),
    ):  # fmt: skip
        status, headers, raw = server.request(method, path)
        assert (status, error_of(raw)["code"]) == (401, "invalid_api_key"), path
        assert headers["www-authenticate"] == "Bearer"
    for known in ({"authorization": "Bearer plain"}, {"x-api-key": "plain"}, KEY):
        assert server.request("GET", "/version", headers=known)[0] == 200


def test_time_is_limited_for_the_first_token() -> None:
    """One takes all rows, another waits for one too long."""
    with Server(fake_step_ms=10.0, max_num_seqs=2, first_token_timeout_s=2.5) as server:
        running = Open(server, rows=2)
        assert running.status() == 200, running.rest()
        server.wait(lambda: server.metric("headrace_requests_running") == 2, "no row is free")
        status, _, raw = server.request("POST", TEXT, LONG)
        assert (status, error_of(raw)["code"]) == (504, "first_token_timed_out")
        assert "2.5 s" in error_of(raw)["message"]
        running.leave()


def test_time_is_limited_for_the_whole() -> None:
    with Server(fake_step_ms=10.0, request_timeout_s=3.0) as server, ThreadPoolExecutor() as pool:
        whole = pool.submit(server.request, "POST", TEXT, LONG)
        running = Open(server, rows=2)
        assert running.status() == 200, running.rest()
        *chunks, last = events(running.rest())
        assert last["error"]["code"] == "timed_out"
        assert "in 3 s" in last["error"]["message"]
        assert chunks
        assert "[DONE]" not in chunks
        status, _, raw = whole.result()  # not streamed: its own status
        assert (status, error_of(raw)["code"]) == (504, "timed_out")


def test_one_request_too_many_is_a_503_in_whatever_process(server: Server) -> None:
    held = [Open(server) for _ in range(3)]
    assert [one.status() for one in held] == [200, 200, 200]
    codes = set()

    def refused() -> bool:
        status, headers, raw = server.request("POST", TEXT, {"prompt": "x", "max_tokens": 1}, KEY)
        if status == 503:
            codes.add((error_of(raw)["code"], headers["retry-after"]))
        return status == 503

    for _ in range(6):  # either process
        assert refused()
    assert codes == {("too_many_streams", "1")}
    assert server.request("POST", "/tokenize", {"prompt": "x"}, KEY)[0] == 200
    assert server.request("GET", "/v1/models", headers=KEY)[0] == 200
    for one in held:
        one.leave()
    server.wait(lambda: not refused(), "the seats of those who left")


def test_strict_names_each_unknown_field(server: Server) -> None:
    for path, body in LEGAL.items():
        status, _, raw = server.request("POST", path, {**body, "bananas": 1, "pears": 2}, KEY)
        error = json.loads(raw)["error"]
        assert (status, error.get("param", "bananas")) == (400, "bananas"), path
        assert "bananas, pears" in error["message"]
    many = {f"{i}" * 100: 1 for i in range(200)}
    status, _, raw = server.request("POST", TEXT, {"prompt": "x", **many}, KEY)
    assert status == 400
    assert len(raw) < 2000
    status, _, raw = server.request("POST", TEXT, {"prompt": "x", "user": "me"}, KEY)
    assert status == 200, raw


def test_n_and_schemas_are_limited(server: Server) -> None:
    status, _, raw = server.request("POST", TEXT, {"prompt": "x", "n": 3}, KEY)
    assert (status, error_of(raw)["param"]) == (400, "n")
    schema = {"type": "object", "description": "x" * 100}
    body = {"prompt": "x", "structured_outputs": {"json": schema}}
    status, _, raw = server.request("POST", TEXT, body, KEY)
    assert (status, error_of(raw)["param"]) == (400, "structured_outputs")
    assert "100 is the most" in error_of(raw)["message"]


def test_only_a_named_page_may_call(server: Server) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    status, headers, _ = server.request("OPTIONS", CHAT, headers={"origin": PAGE, **asks})
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-api-key" in headers["access-control-allow-headers"].lower()
    other = {"origin": "https://other.example"}
    status, headers, _ = server.request("OPTIONS", CHAT, headers={**other, **asks})
    assert (status, headers.get("access-control-allow-origin")) == (400, None)
    _, headers, _ = server.request("GET", "/version", headers={"origin": PAGE, **KEY})
    assert headers["access-control-allow-origin"] == PAGE
    _, headers, raw = server.request("GET", "/version", headers={"origin": PAGE})
    assert headers["access-control-allow-origin"] == PAGE, "a page can read why it was refused"
    assert error_of(raw)["code"] == "invalid_api_key"
    _, headers, _ = server.request("GET", "/version", headers={**other, **KEY})
    assert "access-control-allow-origin" not in headers


def test_a_web_socket_needs_a_key_and_a_page_that_may(server: Server) -> None:
    url = f"ws://127.0.0.1:{server.port}/v1/chat/ws"

    def dial(**options: Any) -> ClientConnection:
        made: ClientConnection = connect(url, proxy=None, **options)
        return made

    for headers, origin, status in (
        (None, PAGE, 401), ({"x-api-key": "wrong"}, None, 401), (KEY, "https://other.example", 403),
    ):  # fmt: skip
        with pytest.raises(InvalidStatus) as refused:
            dial(additional_headers=headers, origin=origin)
        assert refused.value.response.status_code == status
    with dial(additional_headers=KEY, origin=PAGE) as socket:
        socket.send(json.dumps({"messages": [{"role": "user", "content": "x"}], "n": 3}))
        frame = json.loads(socket.recv(timeout=30))
        assert (frame["status"], frame["error"]["param"]) == (400, "n")


def test_the_log_names_paths_and_counts_but_no_text(server: Server) -> None:
    said = [{"role": "user", "content": "secret words"}]
    body = {"messages": said, "max_tokens": 3, "ignore_eos": True}
    assert server.request("POST", f"{CHAT}?secret=words", body, KEY)[0] == 200
    server.request("POST", TEXT, b'{"prompt": "secret words', KEY)
    server.request("GET", "/secret/words", headers=KEY)
    told = (f"POST {CHAT} 200", "output=3", f"POST {TEXT} 400")  # behind the answers
    server.wait(lambda: all(x in server.log_path.read_text() for x in told), "lines of the log")
    log = server.log_path.read_text()
    for hidden in ("secret", "plain", "kept-as-a-digest"):
        assert hidden not in log
    wait_idle(server)

"""WebSocket /v1/chat/ws with a real client: chunks, several requests at once, aborts, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from socket import SHUT_RDWR
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headrace.api.chat_socket import MAX_REQUESTS
from tests.e2e.serving import Server, events

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """4000 tokens take 20 s: nothing is over before a test on a slow machine is."""
    with Server(fake_step_ms=5.0, max_body_bytes=20_000) as running:
        yield running
        running.wait_idle()


def body(text: str = "hi", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 12, "seed": 1, **more}


def dial(server: Server, **options: Any) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}/v1/chat/ws"
    made: ClientConnection = connect(url, proxy=None, **options)
    return made


def ask(socket: ClientConnection, **request: Any) -> None:
    socket.send(json.dumps(request))


def until_ended(
    socket: ClientConnection, count: int = 1, first: Any = None
) -> dict[str | None, list[Any]]:
    """Frames by request, until `count` requests had their last one. first: one that came before."""
    found: dict[str | None, list[Any]] = {} if first is None else {first["request_id"]: [first]}
    while count:
        frame = json.loads(socket.recv(timeout=30))
        of_request = found.setdefault(frame["request_id"], [])
        last = of_request[-1]["type"] if of_request and frame["request_id"] else "chunk"
        assert last in ("chunk", "response"), "nothing comes after the end"
        of_request.append(frame)
        count -= frame["type"] in ("done", "error", "aborted")
    return found


def text_of(frames: list[Any]) -> str:
    chunks = [frame["data"] for frame in frames if frame["type"] == "chunk"]
    return "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])


def test_the_same_answer_as_over_http(server: Server) -> None:
    _, _, raw = server.request("POST", CHAT, body(stream=True))
    over_http = [event for event in events(raw) if event != "[DONE]"]
    with dial(server) as socket:
        ask(socket, request_id="a", **body(stray=1))
        frames = until_ended(socket)["a"]
        assert frames[-1] == {"type": "done", "request_id": "a", "ignored_fields": ["stray"]}
        assert [frame["type"] for frame in frames[:-1]] == ["chunk"] * (len(frames) - 1)
        said = "".join(c["delta"].get("content", "") for e in over_http for c in e["choices"])
        assert text_of(frames) == said
        ask(socket, **body(stream=False))  # over the same connection, whole, without a name
        response, done = until_ended(socket)["2"]
        assert response["data"]["choices"][0]["message"]["content"] == said
        assert done == {"type": "done", "request_id": "2"}


def test_many_at_once_and_an_abort(server: Server) -> None:
    with dial(server) as socket:
        ask(socket, request_id="long", **body(max_tokens=4000, ignore_eos=True))
        names = [f"q{i}" for i in range(8)]
        for name in names:
            ask(socket, request_id=name, **body(name))
        first = json.loads(socket.recv(timeout=30))
        ask(socket, type="abort", request_id="long")
        ask(socket, type="abort", request_id="nobody")  # may have ended: no answer
        found = until_ended(socket, 9, first)
        assert found["long"][-1]["type"] == "aborted"
        for name in names:
            status, alone = server.post(CHAT, body(name))
            assert status == 200
            assert text_of(found[name]) == alone["choices"][0]["message"]["content"]
    server.wait_idle()


def test_an_abort_before_the_first_chunk_is_one_too(server: Server) -> None:
    """At once, while it waits or computes its prompt, streamed or not."""
    long = body("x" * 900, max_tokens=3000, ignore_eos=True)
    with dial(server) as socket:
        for i in range(12):
            ask(socket, request_id=f"{i}", stream=i % 2 == 0, **long)
            ask(socket, type="abort", request_id=f"{i}")
        found = until_ended(socket, 12)
        assert {frames[-1]["type"] for frames in found.values()} == {"aborted"}
    server.wait_idle()


def test_a_client_that_is_gone_is_no_fault_of_ours(server: Server) -> None:
    """It leaves without a word while answers of each kind are about to be sent."""
    with dial(server) as socket:
        for i in range(12):
            ask(socket, stream=i % 2 == 0, **body("x" * 900, max_tokens=900))
        socket.socket.shutdown(SHUT_RDWR)
    server.wait_idle()
    assert "unexpected error" not in server.log_path.read_text()


def test_mistakes_end_nothing_else(server: Server) -> None:
    with dial(server) as socket:
        ask(socket, request_id="runs", **body(max_tokens=4000, ignore_eos=True))
        refused: list[tuple[Any, str | None, int, str | None]] = [
            (body(temperature=3, request_id="x"), "x", 400, "temperature"),
            (body(model="other", request_id="y"), "y", 404, "model"),
            (body(request_id="runs"), None, 400, "request_id"),
            (body(request_id=""), None, 400, "request_id"),
            ({"type": "abort"}, None, 400, "request_id"),
            ([1], None, 400, None),
        ]
        for frame, *_ in refused:
            socket.send(json.dumps(frame))
        socket.send(b"\x00\x01")
        socket.send('{"messages": ')
        found = until_ended(socket, len(refused) + 2)
        found.setdefault("runs", []).append(json.loads(socket.recv(timeout=30)))  # it goes on
        ask(socket, type="abort", request_id="runs")
        ended = until_ended(socket)["runs"]
        errors = [
            (f["request_id"], f["status"], f["error"]["param"])
            for frames in found.values()
            for f in frames
            if f["type"] == "error"
        ]
        expected = [tuple(rest) for _, *rest in refused] + [(None, 400, None)] * 2
        assert sorted(map(str, errors)) == sorted(map(str, expected))
        assert {frame["type"] for frame in found["runs"]} == {"chunk"}
        assert ended[-1]["type"] == "aborted"


def test_bounds(server: Server) -> None:
    with dial(server) as socket:
        for i in range(MAX_REQUESTS + 1):
            ask(socket, request_id=f"{i}", **body(max_tokens=3000, ignore_eos=True))
        (refused,) = until_ended(socket)[None]
        assert str(MAX_REQUESTS) in refused["error"]["message"]
    server.wait_idle()  # the client left: all are aborted
    with dial(server) as socket:
        ask(socket, **body("x" * 30_000))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


def test_a_client_that_reads_nothing_is_dropped() -> None:
    wanted = body(max_tokens=4000, ignore_eos=True, logprobs=True, top_logprobs=20)
    with (
        Server(fake_step_ms=1.0, stall_timeout_s=2.0) as server,
        dial(server, ping_interval=None, max_queue=1) as socket,
    ):
        for i in range(8):
            ask(socket, request_id=f"{i}", **wanted)
        server.wait(lambda: server.metric("headrace_requests_running") > 0, "it runs")
        server.wait_idle()
        assert "took no" in server.log_path.read_text()


def test_another_spelling_of_its_path_is_its_path(server: Server) -> None:
    url = f"ws://127.0.0.1:{server.port}"
    with connect(f"{url}/v1/chat/%77s?a=b", proxy=None) as socket:
        ask(socket, **body(max_tokens=1))
        assert until_ended(socket)["1"][-1]["type"] == "done"
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{url}/v1/chat%2Fws", proxy=None)
    assert refused.value.response.status_code == 404


def test_who_may_open_one(server: Server) -> None:
    for origin in (f"http://127.0.0.1:{server.port}", None):
        with dial(server, origin=origin) as socket:
            ask(socket, **body())
            until_ended(socket)
    with pytest.raises(InvalidStatus) as refused, dial(server, origin="http://evil.example"):
        pass
    assert refused.value.response.status_code == 403
    assert json.loads(refused.value.response.body)["error"]["code"] == "forbidden"
    status, _, raw = server.request("GET", "/v1/chat/ws")
    assert (status, json.loads(raw)["error"]["code"]) == (404, "route_not_found")

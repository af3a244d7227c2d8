"""Streams that a client comes back to: over several HTTP processes, by every protocol."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from websockets.sync.client import connect

from tests.e2e.serving import Server

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS = "/v1/completions"
ID = re.compile(r"^id: (\d+-(?:[0-9a-f]{12}-)?[0-9a-f]{32})\.(\d+)$", re.MULTILINE)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """3500 tokens take 17 s, and their events fit into a buffer: nothing is over or forgotten
    before a test on a slow machine is."""
    with Server(workers=2, fake_step_ms=5.0, keepalive_s=0.3, stream_resume_s=60.0) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Server]:
    """One with small buffers."""
    settings: dict[str, Any] = {"stream_resume_s": 60.0, "stream_resume_bytes": 200_000}
    with Server(workers=2, fake_step_ms=2.0, **settings) as running:
        yield running
        running.wait_idle()


class Listens(Protocol):
    """A server, or a gateway before it."""

    port: int


class Reader:
    """One connection that reads a stream, as far as it likes."""

    def __init__(
        self, server: Listens, path: str, body: Any = None, last: str | None = None
    ) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        head = {"content-type": "application/json"} if body is not None else {}
        if last is not None:
            head["last-event-id"] = last
        raw = json.dumps(body) if body is not None else None
        self.connection.request("GET" if body is None else "POST", path, raw, head)
        self.response = self.connection.getresponse()
        self.name = self.response.getheader("x-headrace-stream-id", "")

    def events(self, count: int = 10**9) -> list[str]:
        """The next `count` events, or all, without comments."""
        found: list[str] = []
        lines: list[str] = []
        while len(found) < count and (line := self.response.readline()):
            if line != b"\n":
                lines.append(line.decode())
                continue
            if not lines[0].startswith(":"):
                found.append("".join(lines))
            lines = []
        return found

    def close(self) -> None:
        self.response.close()
        self.connection.close()


def body(path: str = CHAT, **more: Any) -> dict[str, Any]:
    asked = {RESPONSES: {"input": "hi"}, COMPLETIONS: {"prompt": "hi"}}.get(path, {"messages": HI})
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return {**asked, limit: 60, "seed": 3, "stream": True, "ignore_eos": True, **more}


def last_id(events: list[str]) -> str:
    match = ID.search(events[-1])
    assert match is not None, events[-1]
    return f"{match[1]}.{match[2]}"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, COMPLETIONS])
def test_back_and_back_again(server: Server, path: str) -> None:
    reader = Reader(server, path, body(path))
    seen = reader.events(3)
    name = reader.name
    for turn in range(8):  # each connection may land on either process
        reader.close()
        if turn % 2:
            reader = Reader(server, f"/v1/streams/{name}", last=last_id(seen))
        else:
            reader = Reader(server, path, {}, last=last_id(seen))
        assert reader.response.status == 200
        assert reader.response.getheader("content-type", "").startswith("text/event-stream")
        seen += reader.events(3)
    seen += reader.events()
    reader.close()
    ids = [ID.search(event) for event in seen]
    assert [(match[1], int(match[2])) for match in ids if match] == [
        (name, number) for number in range(1, len(seen) + 1)
    ]
    last = {CHAT: "[DONE]", MESSAGES: "message_stop", RESPONSES: "response.incomplete"}
    assert last.get(path, "[DONE]") in seen[-1]
    if path == CHAT:
        datas = [json.loads(e.split("data: ", 1)[1]) for e in seen[:-1]]
        text = "".join(c["delta"].get("content", "") for d in datas for c in d["choices"])
        status, whole = server.post(CHAT, body(stream=False))
        assert (status, whole["choices"][0]["message"]["content"]) == (200, text)
    again = Reader(server, f"/v1/streams/{name}")  # from the start: it has ended, and is kept
    assert again.events() == seen
    again.close()


def test_an_end_on_demand(server: Server) -> None:
    aborted = server.metric("headrace_requests_finished_total", reason="abort")
    for _ in range(4):  # either process may get it
        reader = Reader(server, CHAT, body(max_tokens=3500))
        reader.events(2)
        reader.close()
        status, _, raw = server.request("DELETE", f"/v1/streams/{reader.name}")
        assert (status, json.loads(raw)["ended"]) == (200, True)
        server.wait_idle()
    assert server.metric("headrace_requests_finished_total", reason="abort") == aborted + 4
    assert server.request("DELETE", "/v1/streams/7-" + "0" * 32)[0] == 404


def test_a_newer_reader_takes_over(server: Server) -> None:
    first = Reader(server, CHAT, body(max_tokens=3500))
    seen = first.events(2)
    assert server.request("HEAD", f"/v1/streams/{first.name}")[0] == 405
    seen += first.events(200)
    assert "[DONE]" not in seen[-1], "who reads goes on"
    second = Reader(server, f"/v1/streams/{first.name}", last=last_id(seen))
    assert len(second.events(2)) == 2
    assert not any("[DONE]" in event for event in first.events()), "it ends, the answer does not"
    assert server.request("DELETE", f"/v1/streams/{first.name}")[0] == 200
    first.close()
    second.close()


def test_a_bounded_buffer(forgetful: Server) -> None:
    """What was sent is forgotten when newer events need the room; what was not waits."""
    asked = body(max_tokens=700, logprobs=True, top_logprobs=20)
    reader = Reader(forgetful, CHAT, asked)
    seen = reader.events(200)
    late = Reader(forgetful, f"/v1/streams/{reader.name}", last=f"{reader.name}.1")
    error = json.loads(late.response.read())["error"]
    assert (late.response.status, error["code"]) == (404, "events_forgotten")
    late.close()
    seen += reader.events()
    reader.close()
    numbers = [int(last_id([event]).rpartition(".")[2]) for event in seen]
    assert numbers == list(range(1, len(seen) + 1)), "none was dropped unread"
    assert "[DONE]" in seen[-1]
    kept = 1  # events that half of the buffer holds, however many tokens each brings
    while sum(map(len, seen[-kept - 1 :])) < 100_000:
        kept += 1
    again = Reader(forgetful, f"/v1/streams/{reader.name}", last=last_id(seen[:-kept]))
    assert again.events() == seen[-kept:]
    again.close()


def test_an_end_when_the_first_events_are_forgotten(forgetful: Server) -> None:
    """Whichever process gets it."""
    for _ in range(4):
        reader = Reader(forgetful, CHAT, body(max_tokens=3500, logprobs=True, top_logprobs=20))
        reader.events(200)
        reader.close()
        status, _, raw = forgetful.request("DELETE", f"/v1/streams/{reader.name}")
        assert (status, json.loads(raw).get("ended")) == (200, True)
    forgetful.wait_idle()


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, COMPLETIONS])
def test_a_stream_of_another_route(server: Server, path: str) -> None:
    """Whichever process gets the request; who reads the stream goes on."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    first = Reader(server, path, body(path, **{limit: 3500}))
    last = last_id(first.events(2))
    for other in {CHAT, MESSAGES, RESPONSES, COMPLETIONS} - {path}:
        for _ in range(4):
            late = Reader(server, other, {}, last=last)
            error = json.loads(late.response.read())["error"]
            late.close()
            assert (late.response.status, error["type"]) == (400, "invalid_request_error")
            assert other == MESSAGES or error["param"] == "Last-Event-ID"
            for named in ("Last-Event-ID", f"at {path}, and this is {other}:", first.name):
                assert named in error["message"]
    assert first.events(200)[-1].count("id: ") == 1
    for back in (path, f"/v1/streams/{first.name}"):
        second = Reader(server, back, {} if back == path else None, last=last)
        assert second.response.status == 200
        assert len(second.events(2)) == 2
        second.close()
    assert server.request("DELETE", f"/v1/streams/{first.name}")[0] == 200
    first.close()


def test_several_event_ids_or_an_empty_one(server: Server) -> None:
    """A GET reads the header as a POST does; each process says the same."""
    reader = Reader(server, CHAT, body(max_tokens=3))
    seen = reader.events()
    reader.close()
    one = last_id(seen[:1])
    for _ in range(4):
        for given, status in (([""], 200), ([one, one], 400), ([one, ""], 400), ([one], 200)):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            connection.putrequest("GET", f"/v1/streams/{reader.name}")
            for value in given:
                connection.putheader("last-event-id", value)
            connection.endheaders()
            response = connection.getresponse()
            raw = response.read()
            connection.close()
            assert response.status == status, given
            if status == 200:
                assert raw.count(b"id: ") == len(seen) - (given == [one])
        late = Reader(server, f"/v1/streams/{reader.name}", last="99")
        assert json.loads(late.response.read())["error"]["param"] == "Last-Event-ID"
        late.close()


def test_a_socket_goes_on_with_no_stream(server: Server) -> None:
    reader = Reader(server, CHAT, body(max_tokens=3))
    last = last_id(reader.events()[:1])
    reader.close()
    url = f"ws://127.0.0.1:{server.port}/v1/chat/ws"
    with connect(url, proxy=None, additional_headers={"last-event-id": last}) as socket:
        socket.send(json.dumps({**body(max_tokens=2), "stream": False}))
        frame = json.loads(socket.recv(timeout=30))
        assert (frame["type"], frame["data"]["usage"]["completion_tokens"]) == ("response", 2)


@pytest.mark.parametrize("last", ["x", "1", "0-" + "0" * 32, "0-" + "0" * 32 + ".x", ".1", "-1"])
def test_ids_that_are_none(server: Server, last: str) -> None:
    status, _, raw = server.request("POST", CHAT, body(), headers={"last-event-id": last})
    assert (status, json.loads(raw)["error"]["param"]) == (400, "Last-Event-ID")
    reader = Reader(server, CHAT, body(max_tokens=2))
    reader.events()
    late = Reader(server, f"/v1/streams/{reader.name}", last="9999")
    assert late.response.status == 400
    late.close()
    reader.close()


def test_errors_before_the_first_event_are_what_they_were(server: Server) -> None:
    status, answer = server.post(CHAT, body(max_tokens=10**6))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

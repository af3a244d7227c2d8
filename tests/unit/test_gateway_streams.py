"""Streams through the relay: errors in them, bytes as they come, and what usage is read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.gateway_rig import (
    Asked,
    Mock,
    Out,
    call,
    chat,
    chunk_of,
    data_of,
    gateway,
    metric,
    until,
    usage_of,
)


async def test_b096_an_error_in_a_stream_is_passed_on_and_counted() -> None:
    error = {"error": {"message": "no", "code": 500}}

    async def answer(asked: Asked, out: Out) -> None:
        await out.head()
        for text in "abc":
            await out.event(chunk_of(text))
        await out.event(error)
        await out.event("[DONE]")
        await out.end()

    async with Mock(answer) as worker, Mock() as other, gateway(worker, other) as made:
        other.health = 500
        await until(lambda: not made.fleet.workers[other.url].up, "one worker is left")
        reply = await call(made.port, chat(stream=True))
        assert data_of(reply.body) == [*map(chunk_of, "abc"), error, "[DONE]"]
        assert await metric(made, "stream_errors_total", worker=worker.url) == 1
        assert await metric(made, "streams_without_end_total") == 0
        assert len(worker.asked) == 1


async def test_b096_a_worker_that_dies_in_a_stream_leaves_an_error_and_no_end() -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.head()
        await out.event(chunk_of("a"))
        await out.chunk(b'data: {"choices"')
        await asyncio.sleep(0)
        out.kill()

    async with Mock(answer) as worker, Mock(answer) as other, gateway(worker, other) as made:
        reply = await call(made.port, chat(stream=True))
        assert reply.status == 200
        first, last = data_of(reply.body)
        assert first == chunk_of("a")
        assert last["error"]["code"] == "worker_lost"
        assert b"finish_reason" not in reply.body
        assert b"[DONE]" not in reply.body
        assert len(worker.asked) + len(other.asked) == 1  # no second try after a byte was sent
        assert await metric(made, "streams_without_end_total") == 1
        assert await metric(made, "worker_failures_total", kind="broken") == 1


async def test_a_stream_that_ends_without_its_end_is_counted() -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.head()
        await out.event(chunk_of("a"))
        await out.end()

    async with Mock(answer) as worker, gateway(worker) as made:
        reply = await call(made.port, chat(stream=True))
        assert data_of(reply.body) == [chunk_of("a")]
        assert await metric(made, "streams_without_end_total", worker=worker.url) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "no", "code": 429}, 429),
        ({"message": "no", "type": "invalid_request_error", "code": "x"}, 400),
        ({"message": "no"}, 500),
    ],
)
async def test_b096_a_stream_that_begins_with_an_error_has_its_status(
    error: dict[str, Any], status: int
) -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.head()
        await out.event({"error": error})
        await out.event("[DONE]")
        await out.end()

    async with Mock(answer) as worker, gateway(worker) as made:
        reply = await call(made.port, chat(stream=True))
        assert (reply.status, reply.json()) == (status, {"error": error})
        assert await metric(made, "stream_errors_total") == 1


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/messages", "api_error"), ("/v1/responses", "error")]
)
async def test_a_lost_worker_is_told_in_the_shape_of_the_protocol(path: str, kind: str) -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.head()
        await out.chunk(b"event: x\ndata: {}\n\n")
        out.kill()

    async with Mock(answer) as worker, gateway(worker) as made:
        reply = await call(made.port, chat(stream=True), path)
        assert reply.body.rstrip().splitlines()[-2] == b"event: error"
        last = data_of(reply.body)[-1]
        assert (last["error"]["type"] if path == "/v1/messages" else last["type"]) == kind


async def test_b097_bytes_are_relayed_unchanged_however_they_are_cut() -> None:
    said = ": hello\r\n\r\ndata: " + json.dumps(chunk_of("ä€😀"), ensure_ascii=False) + "\r\n\r\n"
    said += "data: {\r\ndata: }\r\n\r\n"
    said += "data: " + json.dumps({"choices": [], "usage": usage_of(5, 2, 1)}) + "\r\n\r\n"
    said += "data: [DONE]\r\n\r\n"

    async def answer(asked: Asked, out: Out) -> None:
        await out.head()
        for byte in said.encode():
            await out.chunk(bytes([byte]))
        await out.end()

    body = chat(stream=True, stream_options={"include_usage": True})
    async with Mock(answer) as worker, gateway(worker) as made:
        reply = await call(made.port, body)
        assert reply.body == said.encode()
        assert await metric(made, "tokens_total", kind="prompt") == 5
        assert await metric(made, "tokens_total", kind="cached") == 1
        assert await metric(made, "streams_without_end_total") == 0


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {"include_usage": False, "other": 1}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
async def test_b098_usage_is_read_and_shown_only_to_those_who_asked(
    options: dict[str, Any], shown: bool
) -> None:
    async with Mock() as worker, gateway(worker) as made:
        reply = await call(made.port, chat(stream=True, **options))
        asked = worker.asked[0].json()
        assert asked["stream_options"]["include_usage"] is True
        assert asked["messages"] == chat()["messages"]
        if options.get("stream_options"):
            assert asked["stream_options"].get("other") == options["stream_options"].get("other")
        assert (b'"usage"' in reply.body) is shown
        assert data_of(reply.body)[-1] == "[DONE]"
        assert await metric(made, "tokens_total", kind="output") == 2


@pytest.mark.parametrize(
    "usage", [b'{"a":"\xff"}', b"[" * 5000 + b"]" * 5000, b'{"prompt_tokens":"\\ud800"}']
)
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_that_nobody_can_read_passes(usage: bytes, stream: bool) -> None:
    said = b'{"choices":[{}],"usage":%b}' % usage

    async def odd(asked: Asked, out: Out) -> None:
        if stream:
            await out.head()
            await out.chunk(b"data: %b\n\n" % said)
            await out.end()
            return
        kind = b"content-type: application/json"
        await out.raw(b"HTTP/1.1 200 X\r\n%b\r\ncontent-length: %d\r\n\r\n" % (kind, len(said)))
        await out.raw(said)

    async with Mock(odd) as worker, gateway(worker) as made:
        reply = await call(made.port, chat(stream=stream))
        assert reply.status == 200
        assert said in reply.body
        assert await metric(made, "tokens_total", kind="output") == 0


@pytest.mark.parametrize(
    "options", ["", ',"stream_options":{"include_usage":false,"continuous_usage_stats":true}']
)
async def test_who_asked_for_no_usage_gets_the_bytes_of_a_worker_that_was_not_asked(
    options: str,
) -> None:
    """OpenAI: with include_usage all chunks have a usage, null but for the last."""
    events = [json.dumps(chunk_of(text), separators=(",", ":")) for text in ("a", ',"usage":null}')]
    used = json.dumps({"choices": [], "usage": usage_of(5, 2, 1)}, separators=(",", ":"))

    async def answer(asked: Asked, out: Out) -> None:
        given = asked.json().get("stream_options") or {}
        told = bool(given.get("include_usage"))
        value = used[24:-1] if given.get("continuous_usage_stats") else "null"
        await out.head()
        for number, event in enumerate(events, 1):
            more = f',"usage":{value}}}' if told else "}"
            await out.chunk(f"id: s.{number}\ndata: {event[:-1]}{more}\n\n".encode())
        await out.chunk(f"id: s.3\ndata: {used}\n\ndata: [DONE]\n\n".encode())
        await out.end()

    body = f'{{"model":"m","messages":[],"seed":1e5,"x":"Ŋ","stream":true{options}}}'.encode()
    async with Mock(answer) as worker, gateway(worker) as made:
        reply = await call(made.port, body)
        expected = [f"id: s.{i}\ndata: {event}\n\n" for i, event in enumerate(events, 1)]
        assert reply.body.decode() == "".join(expected) + "data: [DONE]\n\n"
        assert await metric(made, "tokens_total", kind="prompt") == 5
        assert b'"seed":1e5' in worker.asked[0].body  # as it came


@pytest.mark.parametrize("value", [0, "", [], {}, "yes", 1])
async def test_a_worker_sees_and_refuses_what_is_no_boolean(value: Any) -> None:
    async with Mock() as worker, gateway(worker) as made:
        await call(made.port, chat(stream=True, stream_options={"include_usage": value}))
        assert worker.asked[0].json()["stream_options"] == {"include_usage": value}


async def test_usage_is_not_asked_for_when_it_is_off() -> None:
    async with Mock() as worker, gateway(worker, ask_usage=False) as made:
        await call(made.port, chat(stream=True))
        assert "stream_options" not in worker.asked[0].json()

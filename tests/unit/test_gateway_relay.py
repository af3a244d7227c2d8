"""The relay: what reaches the worker, what comes back, and what happens when something breaks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.gateway.tenants import Doorkeeper, KeySpec
from headrace.gateway.upstream import Pool, fetch
from tests.unit.gateway_rig import (
    PATIENCE_S,
    Asked,
    Call,
    Handler,
    Mock,
    Out,
    answer_well,
    call,
    chat,
    chunk_of,
    gateway,
    get,
    metric,
    until,
    usage_of,
)


def data_of(body: bytes) -> list[Any]:
    """The events' payloads."""
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_what_reaches_the_worker_and_what_comes_back() -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"ok": True}, extra="x-own: 1\r\nx-request-id: other\r\n")

    async with Mock(answer) as worker, gateway(worker) as made:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {
            "traceparent": trace,
            "tracestate": "a=b",
            "x-request-id": "my-id.1",
            "authorization": "Bearer theirs",
            "accept-encoding": "gzip",
            "x-anything": "kept",
        }
        body = b'{"model": "m", "messages" : [{"role":"user","content":"\xc3\xa4"}], "new": 1e3}'
        reply = await call(made.port, body, "/v1/chat/completions?a=b", headers)
    assert (reply.status, reply.json()) == (200, {"ok": True})
    assert (reply.headers["x-own"], reply.headers["x-request-id"]) == ("1", "my-id.1")
    asked = worker.asked[0]
    assert asked.target == "/v1/chat/completions?a=b"
    assert asked.body == body
    kept = ("traceparent", "tracestate", "x-request-id", "authorization", "x-anything")
    assert {name: asked.headers[name] for name in kept} == {name: headers[name] for name in kept}
    assert "accept-encoding" not in asked.headers
    assert "connection" not in asked.headers


async def test_connections_to_workers_are_kept() -> None:
    async with Mock() as worker, gateway(worker) as made:
        peers = set()

        async def answer(asked: Asked, out: Out) -> None:
            peers.add(out._writer.get_extra_info("peername"))
            await answer_well(asked, out)

        worker.handler = answer
        for stream in (False, True, False):
            assert (await call(made.port, chat(stream=stream))).status == 200
    assert len(peers) == 1


async def test_pipelined_requests_get_answers_in_order() -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"n": asked.json()["n"]})

    async with Mock(answer) as worker, gateway(worker) as made, Call(made.port) as made_call:
        bodies = [json.dumps(chat(n=n)).encode() for n in range(4)]
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        made_call._writer.write(b"".join(head % len(b) + b for b in bodies))
        await made_call.see(b'{"n": 3}')
        at = [made_call.seen.index(b'{"n": %d}' % n) for n in range(4)]
        assert at == sorted(at)


@pytest.mark.parametrize(
    ("body", "path", "method", "status", "code"),
    [
        (b"{", "/v1/chat/completions", "POST", 400, "invalid_request"),
        (b"[]", "/v1/chat/completions", "POST", 400, "invalid_request"),
        (b"[" * 5000, "/v1/chat/completions", "POST", 400, "invalid_request"),
        (b'{"model":"\xff"}', "/v1/chat/completions", "POST", 400, "invalid_request"),
        (
            b'{"stream":true,"stream_options":{},"x":"\xff"}',
            "/v1/completions",
            "POST",
            400,
            "invalid_request",
        ),
        (b'{"worker":"\xff"}', "/gateway/drain", "POST", 400, "invalid_request"),
        (b"[" * 5000, "/gateway/drain", "POST", 400, "invalid_request"),
        (b"x" * 2000, "/v1/chat/completions", "POST", 413, "request_too_large"),
        (b"", "/v1/nothing", "POST", 404, "not_found"),
        (b"", "/v1/chat/completions", "GET", 405, "method_not_allowed"),
        (b'{"model":"other"}', "/v1/completions", "POST", 404, "model_not_found"),
        (b"", "/gateway/decisions/none", "GET", 404, "not_found"),
    ],
)
async def test_what_the_gateway_refuses(
    body: bytes, path: str, method: str, status: int, code: str
) -> None:
    limit = 10_000 if body.startswith(b"[[") else 1000
    async with Mock() as worker, gateway(worker, max_body_bytes=limit) as made:
        reply = await call(made.port, body, path, method=method)
        assert (reply.status, reply.json()["error"]["code"]) == (status, code)
        assert not worker.asked


async def test_no_http_and_too_large_a_head() -> None:
    async with Mock() as worker, gateway(worker) as made:
        async with Call(made.port) as one:
            one._writer.write(b"\x16\x03\x01 hello\r\n\r\n")
            assert (await one.whole()).status == 400
        async with Call(made.port) as one:
            one._writer.write(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)
            assert (await one.whole()).status == 400


async def test_offers_to_upgrade_and_expectations() -> None:
    async with Mock() as worker, gateway(worker) as made:
        offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AA"}
        async with Call(made.port) as one:
            await one.send(chat(), headers=offer)
            await one.see(b'"usage"')
        async with Call(made.port) as one:
            await one.send(chat(), headers={"expect": "100-continue"})
            await one.see(b"100 Continue")
            await one.see(b'"usage"')


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async with Mock() as worker, gateway(worker) as made, Call(made.port) as one:
        body = json.dumps(chat(stream=True)).encode()
        one._writer.write(
            b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        reply = await one.whole()
    assert reply.body.startswith(b"data: ")
    assert reply.body.endswith(b"data: [DONE]\n\n")


async def test_bytes_pass_as_they_come() -> None:
    """The second event is not made before the client has the first."""
    seen = asyncio.Event()

    async def answer(asked: Asked, out: Out) -> None:
        await out.head(extra="x-accel-buffering: yes\r\n")
        await out.event(chunk_of("one"))
        await seen.wait()
        await out.event("[DONE]")
        await out.end()

    async with Mock(answer) as worker, gateway(worker) as made, Call(made.port) as one:
        await one.send(chat(stream=True))
        await one.see(b"one")
        assert made.fleet.workers[worker.url].decode_tokens > 0
        seen.set()
        reply = await one.whole()
        assert reply.headers["x-accel-buffering"] == "no"
        assert data_of(reply.body) == [chunk_of("one"), "[DONE]"]


# ------------------------------------------------------------ B093: cancel


async def _before_head(asked: Asked, out: Out) -> None:
    await out.gone()


async def _after_head(asked: Asked, out: Out) -> None:
    await out.head()
    await out.gone()


async def _mid_stream(asked: Asked, out: Out) -> None:
    await out.head()
    await out.event(chunk_of("one"))
    await out.gone()


async def _in_an_event(asked: Asked, out: Out) -> None:
    await out.head()
    await out.event(chunk_of("one"))
    await out.chunk(b"data: {")
    await out.gone()


@pytest.mark.parametrize("handler", [_before_head, _after_head, _mid_stream, _in_an_event])
@pytest.mark.parametrize("stream", [True, False])
async def test_b093_a_client_that_leaves_ends_its_request_at_the_worker(
    handler: Handler, stream: bool
) -> None:
    told = asyncio.Event()

    async def answer(asked: Asked, out: Out) -> None:
        await handler(asked, out)
        told.set()

    async with Mock(answer) as worker, gateway(worker) as made, Call(made.port) as one:
        await one.send(chat(stream=stream))
        await until(lambda: bool(worker.asked), "the request is there")
        if stream and handler in (_mid_stream, _in_an_event):
            await one.see(b"one")
        one.leave()
        async with asyncio.timeout(PATIENCE_S):
            await told.wait()
        await until(lambda: not made.exchanges, "no request is left")
        assert await metric(made, "requests_total", status="499") == 1
        assert await metric(made, "worker_failures_total") == 0


async def test_a_client_that_leaves_while_the_gateway_connects() -> None:
    async with Mock() as worker, gateway(worker) as made:
        started = asyncio.Event()
        pool = made.fleet.workers[worker.url].pool

        async def never() -> Any:
            started.set()
            await asyncio.Event().wait()

        pool.connect = never  # type: ignore[method-assign]
        async with Call(made.port) as one:
            await one.send(chat())
            await started.wait()
            one.leave()
            await until(lambda: not made.exchanges, "no request is left")


async def test_a_slow_client_holds_back_its_worker_alone() -> None:
    sent = 0

    async def answer(asked: Asked, out: Out) -> None:
        nonlocal sent
        await out.head()
        for _ in range(2000):
            await out.event(chunk_of("x" * 20_000))
            sent += 1
        await out.event("[DONE]")
        await out.end()

    async with Mock(answer) as worker, gateway(worker) as made, Call(made.port) as one:
        await one.send(chat(stream=True))
        await one.see(b"xxx")
        held, before = -1, -2
        while held != before:  # nobody reads: the worker comes to a halt
            before = sent
            await asyncio.sleep(0.2)
            held = sent
        assert held < 1900
        reply = await one.whole()
        assert len(data_of(reply.body)) == 2001


# ------------------------------------------------------------ B096: errors in streams


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


# ------------------------------------------------------------ B097, B098: bytes and usage


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


async def test_head_is_get_without_the_body() -> None:
    """So that what comes next on the connection is the next answer."""
    async with Mock() as worker, gateway(worker) as made, Call(made.port) as one:
        for path in ("/health", "/v1/models", "/v1/chat/completions"):
            await one.send(None, path, {"connection": "keep-alive"}, "HEAD")
        await one.send(None, "/health", method="GET")
        await one.whole()
        heads = bytes(one.seen).split(b"HTTP/1.1 ")[1:]
        assert [head[:3] for head in heads] == [b"200", b"200", b"405", b"200"]
        assert [head.partition(b"\r\n\r\n")[2] for head in heads[:3]] == [b""] * 3
        assert b"content-length: 0" not in heads[0]
        assert heads[3].endswith(b'{"status":"ok"}')


async def test_a_target_with_its_host_is_the_path_alone() -> None:
    async with Mock() as worker, gateway(worker) as made:
        path = "http://any.test:80/v1/chat/completions?a=b"
        assert (await call(made.port, chat(), path)).status == 200
        assert worker.asked[0].target == "/v1/chat/completions?a=b"
        assert (await get(made.port, "HTTP://any.test/health")).status == 200
        assert (await get(made.port, "http://any.test")).status == 404
        keyed = Doorkeeper((KeySpec(key="op", admin=True),), {})
    async with Mock() as worker, gateway(worker, doorkeeper=keyed) as made:
        for path in ("/gateway/queue", "/gateway/workers", "/metrics"):
            assert (await get(made.port, f"http://any.test{path}")).status == 401


async def test_pages_of_other_sites_change_nothing() -> None:
    async with Mock() as worker, gateway(worker) as made:
        body = {"worker": worker.url}
        for headers in (
            {"host": "localhost", "origin": "http://evil.test"},
            {"host": "evil.test", "origin": "http://evil.test"},
        ):
            reply = await call(made.port, body, "/gateway/drain", headers)
            assert (reply.status, reply.json()["error"]["code"]) == (403, "forbidden")
        assert not made.fleet.workers[worker.url].draining


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


async def test_usage_is_not_asked_for_when_it_is_off() -> None:
    async with Mock() as worker, gateway(worker, ask_usage=False) as made:
        await call(made.port, chat(stream=True))
        assert "stream_options" not in worker.asked[0].json()


# ------------------------------------------------------------ retries


async def test_a_worker_that_refuses_connections_is_passed_over() -> None:
    async with Mock() as worker, Mock() as other, gateway(worker, other) as made:
        for mock in (worker, other):  # both known as up when one dies
            assert made.fleet.workers[mock.url].up
        made._checks._tasks[made.fleet.workers[worker.url]].cancel()
        await worker.die()
        replies = [await call(made.port, chat(stream=bool(i % 2))) for i in range(8)]
        assert [reply.status for reply in replies] == [200] * 8
        assert await metric(made, "retries_total") >= 1


@pytest.mark.parametrize("status", [502, 503, 504, 508])
async def test_a_failed_answer_is_tried_elsewhere_and_told_if_it_fails_everywhere(
    status: int,
) -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"error": {"message": "mine"}}, status, "x-own: 1\r\n")

    async with Mock(answer) as worker, Mock() as other, gateway(worker, other) as made:
        for _ in range(4):
            assert (await call(made.port, chat())).status == 200
        other.handler = answer
        reply = await call(made.port, chat())
        assert (reply.status, reply.json()["error"]["message"]) == (status, "mine")
        assert reply.headers["x-own"] == "1"


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_other_answers_are_passed_on_and_never_tried_again(status: int) -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"error": {"message": "mine"}}, status)

    async with Mock(answer) as worker, Mock(answer) as other, gateway(worker, other) as made:
        assert (await call(made.port, chat())).status == status
        assert len(worker.asked) + len(other.asked) == 1


async def test_a_request_that_kills_workers_does_not_walk_over_the_fleet() -> None:
    async def die(asked: Asked, out: Out) -> None:
        out.kill()

    async with (
        Mock(die) as one,
        Mock(die) as two,
        Mock(die) as three,
        gateway(one, two, three, retries=5) as made,
    ):
        reply = await call(made.port, chat())
        assert (reply.status, reply.json()["error"]["code"]) == (502, "worker_lost")
        assert len(one.asked) + len(two.asked) + len(three.asked) == 2


async def test_a_kept_connection_that_the_worker_closed_is_no_failure() -> None:
    async with Mock() as worker, gateway(worker, check_interval_s=60) as made:
        await call(made.port, chat())

        async def closes(asked: Asked, out: Out) -> None:
            worker.handler = answer_well
            out.kill()

        worker.handler = closes
        assert (await call(made.port, chat())).status == 200
        assert await metric(made, "worker_failures_total") == 0


async def test_the_connection_of_a_check_serves_nothing_else() -> None:
    """Even if the worker leaves it open: whoever took it would be cut with the check's end."""
    async with Mock() as worker:
        worker.stays = True
        pool = Pool("127.0.0.1", worker.port, 5.0)
        status, _ = await fetch(pool, b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n", 5.0)
        assert status == 200
        assert pool.take() is None


# ------------------------------------------------------------ what is told


async def test_models_are_merged_and_requests_go_where_theirs_is() -> None:
    async with Mock(model="a") as one, Mock(model="b") as two, gateway(one, two) as made:
        listed = (await get(made.port, "/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["a", "b"]
        assert listed["data"][0]["owned_by"] == "mock"
        for model, mock in (("a", one), ("b", two)):
            await call(made.port, chat(model=model) | {"model": model})
            assert mock.asked[-1].json()["model"] == model
        assert (len(one.asked), len(two.asked)) == (1, 1)


async def test_a_decision_tells_what_it_was_made_from() -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"usage": usage_of(4000, 2, cached)})

    cached = 0
    async with Mock(answer) as worker, Mock(answer) as other, gateway(worker, other) as made:
        text = "word " * 3000
        await call(made.port, chat(text))
        first = worker if worker.asked else other
        cached = 3900
        await call(made.port, chat(text), headers={"x-request-id": "again"})
        assert len(first.asked) == 2  # the one that holds the prefix
        told = (await get(made.port, "/gateway/decisions/again")).json()
        (attempt,) = told["attempts"]
        assert (attempt["worker"], attempt["reason"]) == (first.url, "prefix")
        assert told["worker_said"]["cached_tokens"] == 3900
        rows = {row["name"]: row for row in attempt["candidates"]}
        assert rows[first.url]["predicted_cached_tokens"] > 3000
        assert sorted(row["score"] for row in rows.values())[0] == rows[first.url]["score"]
        assert told["status"] == 200
        cached = 0
        await call(made.port, chat(text))
        assert await metric(made, "silent_misses_total") == 1


@pytest.mark.parametrize("slow_start_s", [0, 10])
async def test_cold_prompts_spread_evenly_at_light_load(slow_start_s: float) -> None:
    """From the start on: a gateway that has just begun takes no worker for a new one."""
    async with (
        Mock() as a,
        Mock() as b,
        Mock() as c,
        Mock() as d,
        gateway(a, b, c, d, slow_start_s=slow_start_s) as made,
    ):
        for i in range(40):
            await call(made.port, chat(f"{i} " * 400))
        assert [len(mock.asked) for mock in (a, b, c, d)] == [10] * 4

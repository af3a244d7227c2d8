"""The relay: what reaches the worker, what comes back, and what happens when a client leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.gateway.tenants import Doorkeeper, KeySpec
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
    data_of,
    gateway,
    get,
    metric,
    until,
)


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
            b'{"stream":true,"stream_options":{},"\xff":1}',
            "/v1/completions",
            "POST",
            400,
            "invalid_request",
        ),
        (b'{"worker":"\xff"}', "/gateway/drain", "POST", 400, "invalid_request"),
        (b"[" * 5000, "/gateway/drain", "POST", 400, "invalid_request"),
        (b"x" * 2000, "/v1/chat/completions", "POST", 413, "request_too_large"),
        (b"", "/v1/nothing", "POST", 404, "route_not_found"),
        (b"", "/v1/chat/completions", "GET", 405, "method_not_allowed"),
        (b'{"model":"other"}', "/v1/completions", "POST", 404, "model_not_found"),
        (b"", "/gateway/decisions/none", "GET", 404, "decision_not_found"),
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


async def test_errors_have_the_bodies_that_a_server_gives_them() -> None:
    """Anthropic's with the request's id and the kind of too large a body; messages are cut."""
    async with Mock() as worker, gateway(worker, max_body_bytes=1000) as made:
        named = {"x-request-id": "mine"}
        lost = await call(made.port, b'{"model":"other"}', "/v1/messages", named)
        said = lost.json()
        assert (said["type"], said["request_id"]) == ("error", "mine")
        assert said["error"]["type"] == "not_found_error"
        large = (await call(made.port, b"x" * 2000, "/v1/messages")).json()
        assert large["error"]["type"] == "request_too_large"
        long = (await call(made.port, b"", "/v1/" + "a" * 5000)).json()
        assert len(long["error"]["message"]) < 1010


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
        (exchange,) = made.exchanges
        upstream: Any = exchange._upstream
        await until(lambda: not upstream._transport.is_reading(), "the worker is read no more")
        assert sent < 1900
        reply = await one.whole()
        assert len(data_of(reply.body)) == 2001


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

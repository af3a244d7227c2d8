"""What clients send and workers say that no client and no worker should: it costs them alone."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from headrace import homes
from headrace.gateway import board, connection, upstream
from headrace.gateway.board import Board
from headrace.gateway.prompt import PromptReader
from headrace.gateway.registry import StaticRegistry
from headrace.gateway.settings import WorkerSpec
from headrace.gateway.sse import MOST_TOKENS
from headrace.gateway.tenants import Doorkeeper, KeySpec, TierSpec
from tests.unit.gateway_rig import (
    Asked,
    Call,
    Mock,
    Out,
    answer_well,
    call,
    chat,
    gateway,
    get,
    metric,
    until,
    usage_of,
)

HERE = {"host": "localhost"}
HUGE = 10**400  # JSON has it, no float has


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [(HUGE, 2, 3), (10, HUGE, 3), (10, 2, HUGE)])
async def test_a_count_that_cannot_be_is_none(usage: tuple[int, int, int], stream: bool) -> None:
    async def boast(asked: Asked, out: Out) -> None:
        said = {"choices": [{}], "usage": usage_of(*usage)}
        if not stream:
            await out.json(said)
            return
        await out.head()
        await out.event(said)
        await out.event("[DONE]")
        await out.end()

    async with Mock(boast) as worker, gateway(worker) as made:
        reply = await call(made.port, chat(stream=stream))
        assert reply.status == 200
        assert str(HUGE).encode() in reply.body
        for kind, count in zip(("prompt", "output", "cached"), usage, strict=True):
            told = await metric(made, "tokens_total", kind=kind)
            assert told == (0 if count == HUGE else count), kind


async def test_a_limit_that_cannot_be_is_the_most_there_is() -> None:
    """It is what the request counts with where its worker says no usage."""

    async def silent(asked: Asked, out: Out) -> None:
        await out.json({"choices": []})

    async with Mock(silent) as worker, gateway(worker) as made:
        for _ in range(2):
            assert (await call(made.port, chat(max_tokens=HUGE, n=7))).status == 200
        (tenant,) = (await get(made.port, "/gateway/tenants", HERE)).json()["tenants"]
        assert 0 < tenant["served_tokens"] <= 1e12
    body = json.dumps(chat(max_completion_tokens=HUGE)).encode()
    assert PromptReader(True).read("/v1/chat/completions", body, {}).output_tokens == MOST_TOKENS


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": "a", "n": 3, "best_of": 100}, 100),
        ({"prompt": "a", "n": 3, "best_of": 1}, 3),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": ["a"] * 1024, "best_of": 4}, 4096),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": [], "n": True, "best_of": HUGE}, 1),
        ({"prompt": ["a"] * 5000, "best_of": "4"}, 1024),
    ],
)
def test_all_choices_that_are_drawn_are_reserved(fields: dict[str, Any], choices: int) -> None:
    """A small body may ask for much: what a limit lets through is what it may use."""
    for separators in ((",", ":"), (", ", ": ")):
        body = json.dumps({"model": "m", "max_tokens": 10, **fields}, separators=separators)
        read = PromptReader(True).read("/v1/completions", body.encode(), {})
        assert read.output_tokens == 10 * choices
        plain = body.replace("max_tokens", "most").encode()  # OpenAI's default is 16
        assert PromptReader(True).read("/v1/completions", plain, {}).output_tokens == 16 * choices


async def test_another_spelling_of_a_route_is_that_route() -> None:
    """For keys, limits, tokens and errors; a worker gets the one spelling, so it sees what was let
    in."""
    spellings = (
        "/v1/%63hat/completions",
        "/v1/chat/completion%73",
        "http://h/v1/%63hat/completions",
    )
    keys = [KeySpec(key="user"), KeySpec(key="root", admin=True)]
    door = Doorkeeper(keys, {"default": TierSpec(requests_per_min=3)})
    user = {"authorization": "Bearer user"}
    async with Mock() as worker, gateway(worker, doorkeeper=door) as made:
        for path in spellings:
            assert (await call(made.port, chat(), path)).status == 401
            assert (await call(made.port, chat(), path, user)).status == 200
        assert (await call(made.port, chat(), spellings[0], user)).status == 429
        assert [asked.target for asked in worker.asked] == ["/v1/chat/completions"] * 3
        root = {"authorization": "Bearer root"}
        for path in ("/%6detrics", "/gatewa%79/workers", "/gateway/tenant%73"):
            assert (await get(made.port, path)).status == 401
            assert (await get(made.port, path, user)).status == 403
            assert (await get(made.port, path, root)).status == 200
        told = await call(made.port, chat(), "/v1/%6Dessages")
        assert told.json()["type"] == "error"
        for path in ("/v1%2Fchat%2Fcompletions", "/v1/chat%2Fcompletions", "/gateway%2Fworkers"):
            assert (await call(made.port, chat(), path, root)).status == 404
        assert len(worker.asked) == 3


async def test_the_name_of_a_kept_response_leads_nowhere_else() -> None:
    async with Mock() as worker, gateway(worker) as made:
        tag = homes.tag_of(worker.url)
        for more in ("%2F..%2F..%2Fmetrics", "%2finput_items", "%3Fa", "/../x"):
            reply = await get(made.port, f"/v1/responses/resp_{tag}_1{more}?a=%62")
            assert reply.status == 404
        assert not worker.asked
        await get(made.port, f"/v1/responses/resp%5F{tag}_1/input%5fitems?a=%62")
        assert worker.asked[0].target == f"/v1/responses/resp_{tag}_1/input_items?a=%62"


async def test_trailers_are_bounded_and_go_nowhere() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    body = json.dumps(chat()).encode()
    whole = head + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    async with Mock() as worker, gateway(worker) as made:
        async with Call(made.port) as one:
            one._writer.write(whole + b"authorization: Bearer x\r\nx-odd: 1\r\n\r\n")
            await one.see(b'"content"')
        assert not {"authorization", "x-odd"} & worker.asked[0].headers.keys()
        most = connection.MAX_HEAD_BYTES + 3 * connection.READ_BYTES
        for trailer in (b"a: " + b"b" * most, b"a: b\r\n" * (most // 6)):
            async with Call(made.port) as one:
                one._writer.write(whole + trailer)
                await until(lambda: not made.clients, "it is cut")
        assert len(worker.asked) == 1


async def test_many_offers_to_upgrade_in_one_read() -> None:
    one_offer = b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with gateway(up=False) as made, Call(made.port) as one:
        one._writer.write(one_offer * 1500 + b"GET /health HTTP/1.0\r\n\r\n")
        await one.whole()
        assert one.seen.count(b"HTTP/1.1 200 OK") == 1501


async def test_what_a_worker_says_behind_its_answer_is_nobodys() -> None:
    forged = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged"

    async def talkative(asked: Asked, out: Out) -> None:
        more = forged if len(worker.asked) == 1 else forged[:5]
        await out.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nmine" + more)

    async with Mock(talkative) as worker, gateway(worker, retries=0) as made:
        for _ in range(4):
            reply = await call(made.port, chat())
            assert (reply.status, reply.body) == (200, b"mine")


async def test_a_check_that_is_answered_without_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "MAX_FETCHED_BYTES", 10_000)
    async with Mock(card={"x": "y" * 20_000}) as worker, gateway(worker, up=False) as made:
        known = made.fleet.workers[worker.url]
        await until(lambda: "10000 bytes" in known.why, "it is down")
        worker.card = {}
        await until(lambda: known.up, "and up again")


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
async def test_a_name_that_is_none_is_one_that_cannot_be_reached(host: str) -> None:
    spec = WorkerSpec(url=f"http://{host}:9", models=("m",))
    once: dict[str, Any] = {
        "up": False,
        "check_interval_s": 600.0,
    }  # a second check would take it out again
    async with gateway(registry=StaticRegistry([spec]), **once) as made:
        worker = made.fleet.workers[spec.url]
        await until(lambda: worker.why.startswith("no connection"), "it was checked")
        worker.up = True  # somebody thinks so
        assert (await call(made.port, chat())).status == 502


async def test_a_connection_that_is_cut_without_a_word_has_a_reason() -> None:
    """As TLS that ends in the handshake: the error has no text."""

    async def cut() -> upstream.Upstream:
        raise ConnectionResetError

    async with (
        Mock() as worker,
        gateway(worker, retries=0, check_interval_s=600.0) as made,  # a check would take it out
    ):
        made.fleet.workers[worker.url].pool.connect = cut  # type: ignore[method-assign]
        reply = await call(made.port, chat())
        assert reply.json()["error"]["message"].endswith("ConnectionResetError")
    async with Mock() as worker, gateway(worker) as made:
        known = made.fleet.workers[worker.url]
        known.pool.connect = cut  # type: ignore[method-assign]
        await until(lambda: known.why == "no connection: ConnectionResetError", "it is told")


async def test_a_conversation_goes_on_with_a_model_of_its_worker() -> None:
    """And what else a body names is not kept among the decisions, however long it is."""
    async with Mock() as worker, gateway(worker) as made:
        previous = homes.response_id(homes.tag_of(worker.url))
        body = {"model": "n" * 100_000, "input": "hi", "previous_response_id": previous}
        reply = await call(made.port, body, "/v1/responses")
        assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert not worker.asked
        assert (await get(made.port, "/gateway/decisions", HERE)).json()["decisions"] == []
        body["model"] = "m"
        assert (await call(made.port, body, "/v1/responses")).status == 200


async def test_who_is_behind_stays_behind_with_the_next_request() -> None:
    """A client that sends requests in a row and reads nothing of their answers."""

    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"choices": [], "text": "x" * 900_000})

    raw = json.dumps(chat()).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    async with Mock(answer) as worker, gateway(worker) as made:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", made.port))
            await loop.sock_sendall(sock, (head % len(raw) + raw) * 16)
            await until(lambda: any(one._slow for one in made.exchanges), "a worker has to wait")
            assert len(worker.asked) < 16


async def test_more_workers_than_processes_can_count_together(tmp_path: Path) -> None:
    path = tmp_path / "board"
    Board.create(path, 2)
    shared = Board(path, 2, 0)
    for i in range(board.MAX_WORKERS):
        shared.enter(i + 1)
    async with Mock(answer_well) as worker, gateway(worker, board=shared) as made:
        assert (await call(made.port, chat())).status == 200
        made.fleet.apply(())
        assert not made.fleet.workers
    shared.close()

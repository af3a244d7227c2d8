"""Ids that say which worker has what they name, and a gateway that sends their requests there."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import homes
from headrace.api.resume import split_event_id
from headrace.errors import NotFound
from headrace.gateway.kept import is_kept, kept_at, kept_before, route_of
from headrace.gateway.limits import Reservation
from headrace.gateway.registry import StaticRegistry
from headrace.gateway.settings import WorkerSpec
from headrace.gateway.tenants import Doorkeeper, TierSpec
from tests.unit.gateway_rig import (
    Asked,
    Call,
    Mock,
    Out,
    call,
    chunk_of,
    gateway,
    get,
    metric,
    until,
    usage_of,
)

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
TAG = homes.tag_of("http://10.0.0.1:8000")
STRANGE = st.one_of(
    st.text(),
    st.from_regex(r"(resp_)?[0-9a-f]{11,13}_?[0-9a-f]*", fullmatch=True),
    st.from_regex(r"[0-9]{1,7}-([0-9a-f]{12}-)?[0-9a-f]{32}(\.[0-9]{1,16})?", fullmatch=True),
)


@given(st.text(), st.integers(0, 999_999))
def test_ids_say_what_was_put_into_them(worker: str, process: int) -> None:
    tag = homes.tag_of(worker)
    assert homes.given_tag(tag) == tag == homes.tag_of(worker)
    assert homes.tag_in_response(homes.response_id(tag)) == tag
    assert homes.tag_in_response(homes.response_id("")) == ""
    for name in (homes.stream_id(process, tag), homes.stream_id(process, "")):
        assert split_event_id(f"{name}.7", None) == (name, 7)
        assert homes.tag_in_stream(name) == (tag if tag in name else "")
        assert name.startswith(f"{process}-")


@given(st.one_of(st.none(), STRANGE))
def test_what_is_no_tag_is_ignored(header: str | None) -> None:
    tag = homes.given_tag(header)
    assert tag in ("", header)
    assert homes.tag_in_response(homes.response_id(tag)) == tag


@settings(max_examples=200)
@given(STRANGE)
def test_no_id_breaks_the_gateway(text: str) -> None:
    raw = text.encode("utf-8", "replace")
    for path in (
        f"/v1/responses/{text}",
        f"/v1/streams/{text}",
        f"/v1/responses/{text}/input_items",
    ):
        kept = None
        with suppress(NotFound):  # it names no worker
            kept = kept_at(path, {})
            assert (kept is not None) == is_kept(path)
        assert kept is None or len(kept.tag) == homes.TAG_DIGITS
    for kept in (kept_before(text), kept_at(CHAT, {b"last-event-id": raw})):
        assert kept is None or kept.missing().status in (400, 404)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/responses/resp_1", "/v1/responses/{id}"),
        ("/v1/responses/resp_1/input_items", "/v1/responses/{id}/input_items"),
        ("/v1/streams/0-a", "/v1/streams/{id}"),
        (CHAT, CHAT),
        (RESPONSES, RESPONSES),
    ],
)
def test_spans_of_one_route_have_one_name(path: str, route: str) -> None:
    assert route_of(path) == route


@pytest.mark.parametrize("previous", [None, 1, [], {"a": 1}, "resp_1", "", "resp_" + "f" * 48])
def test_a_body_may_say_anything(previous: Any) -> None:
    assert kept_before(previous) is None


class Keeper:
    """A worker that keeps responses under the tag that it was told."""

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.names: list[str] = []

    async def __call__(self, asked: Asked, out: Out) -> None:
        self.tags.append(asked.headers["x-headrace-worker"])
        if asked.target == RESPONSES:
            self.names.append(homes.response_id(self.tags[-1]))
            usage = {"input_tokens": 10, "output_tokens": 2}
            await out.json({"id": self.names[-1], "usage": usage})
            return
        name = asked.target.split("/")[3]
        known = name in self.names
        await out.json({"id": name, "usage": usage_of(9, 9, 9)}, 200 if known else 404)


async def test_what_one_worker_keeps_is_asked_of_that_one() -> None:
    """Of two gateways that share nothing, whatever the load says."""
    keepers = (Keeper(), Keeper())
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(Mock(keeper)) for keeper in keepers]
        made = await stack.enter_async_context(gateway(one, two))
        other = await stack.enter_async_context(gateway(two, one))
        ports, previous = (made.port, other.port), None
        for turn in range(24):
            body = {"model": "m", "input": "hi", "previous_response_id": previous}
            reply = await call(ports[turn % 2], body, RESPONSES)
            previous = reply.json()["id"]
        told = (await get(ports[1], f"/gateway/decisions/{reply.headers['x-request-id']}")).json()
        for method in ("GET", "DELETE"):
            assert (
                await call(ports[0], None, f"{RESPONSES}/{previous}", method=method)
            ).status == 200
        path = f"{RESPONSES}/{previous}/input_items?order=asc"
        assert (await get(ports[1], path)).status == 200
    (worker,) = [keeper for keeper in keepers if keeper.names]
    assert len(worker.names) == 24
    assert len(set(worker.tags)) == 1
    (attempt,) = told["attempts"]
    assert (attempt["reason"], len(attempt["candidates"]), attempt["left_out"]) == ("kept", 1, [])
    assert attempt["candidates"][0]["terms"] == []
    assert [asked.target for asked in one.asked + two.asked][-1] == path


async def test_a_clients_own_tag_goes_nowhere_and_other_ids_go_as_ever() -> None:
    keeper = Keeper()
    async with Mock(keeper) as worker, gateway(worker) as made:
        mark = {"x-headrace-worker": TAG}
        body = {"model": "m", "input": "hi", "previous_response_id": "resp_foreign"}
        assert (await call(made.port, body, RESPONSES, mark)).status == 200
        assert keeper.tags == [homes.tag_of(worker.url)]
        for path in (f"{RESPONSES}/resp_foreign", "/v1/streams/0-" + "a" * 32):
            reply = await get(made.port, path)
            assert reply.status == 404
            assert "does not say which worker" in reply.json()["error"]["message"]
        for method in ("POST", "HEAD", "PUT"):
            path = f"{RESPONSES}/{keeper.names[0]}"
            assert (await call(made.port, None, path, method=method)).status == 405
    assert len(worker.asked) == 1


def wanted(tag: str) -> list[tuple[str, Any, str, dict[str, str]]]:
    """Method, body, path and headers of everything that one worker alone can answer."""
    name, stream = homes.response_id(tag), homes.stream_id(0, tag)
    going_on = {"model": "m", "input": "hi", "previous_response_id": name}
    return [
        ("POST", going_on, RESPONSES, {}),
        ("GET", None, f"{RESPONSES}/{name}", {}),
        ("GET", None, f"/v1/streams/{stream}", {}),
        ("DELETE", None, f"/v1/streams/{stream}", {}),
        ("POST", None, CHAT, {"last-event-id": f"{stream}.3"}),
        ("POST", {"model": "m"}, CHAT, {"last-event-id": f"{stream}.3"}),
    ]


async def ask(port: int, wants: tuple[str, Any, str, dict[str, str]]) -> tuple[int, str]:
    method, body, path, headers = wants
    reply = await call(port, body, path, headers, method)
    said = reply.json()
    return reply.status, said["error"]["code"] if "error" in said else ""


async def test_a_worker_that_drains_answers_and_one_that_left_is_missing() -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"ok": True})

    resumes = {"stream_resume_s": 5.0}
    async with Mock(answer) as one, Mock(answer, card=resumes) as two, gateway(one, two) as made:
        specs = [WorkerSpec(url=mock.url) for mock in (one, two)]
        everything = wanted(homes.tag_of(two.url))
        drained = {"worker": two.url}
        assert (await call(made.port, drained, "/gateway/drain")).status == 200
        for wants in everything:
            assert await ask(made.port, wants) == (200, "")
        assert len(two.asked) == len(everything)
        made._apply(specs[:1])
        assert [await ask(made.port, wants) for wants in everything] == [
            (400, "previous_response_not_found"),
            (404, "response_not_found"),
            *[(404, "stream_not_found")] * 4,
        ]
    assert not one.asked


async def test_no_event_id_begins_a_stream_at_a_worker_that_drains() -> None:
    """One that resumes none knows no such header: there it is a new request."""
    async with Mock() as one, Mock() as two, gateway(one, two) as made:
        tag = homes.tag_of(two.url)
        ids = [f"{homes.stream_id(0, tag)}.3", f"0-{tag}-{'0' * 32}.x"]
        assert (await call(made.port, {"worker": two.url}, "/gateway/drain")).status == 200
        for name in ids:
            reply = await call(made.port, {"model": "m"}, CHAT, {"last-event-id": name})
            assert (reply.status, reply.json()["error"]["code"]) == (503, "no_worker")
            assert "retry-after" in reply.headers
        assert not two.asked
        undone = {"worker": two.url, "drain": False}
        assert (await call(made.port, undone, "/gateway/drain")).status == 200
        reply = await call(made.port, {"model": "m"}, CHAT, {"last-event-id": ids[0]})
        assert reply.status == 200
    assert not one.asked


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/classify", "/tokenize"])
async def test_an_event_id_is_nothing_where_no_stream_begins(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is placed, waits and pays like any other."""
    taken: list[tuple[int, int]] = []

    def settle(self: Reservation, used_tokens: int, now_s: float) -> None:
        taken.append((self.tokens, used_tokens))

    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"usage": {"prompt_tokens": 30, "total_tokens": 30}})

    monkeypatch.setattr(Reservation, "settle", settle)
    async with Mock(answer) as worker, gateway(worker) as made:
        stream = homes.stream_id(0, homes.tag_of(worker.url))
        body = {"model": "m", "input": "one two three " * 10}
        for last in (f"{stream}.1", f"{homes.stream_id(0, TAG)}.1"):
            assert (await call(made.port, body, path, {"last-event-id": last})).status == 200
        assert [(tokens > 10, used) for tokens, used in taken] == [(True, 30)] * 2
        drained = {"worker": worker.url}
        assert (await call(made.port, drained, "/gateway/drain")).status == 200
        reply = await call(made.port, body, path, {"last-event-id": f"{stream}.1"})
        assert (reply.status, reply.json()["error"]["code"]) == (503, "no_worker")


async def test_a_worker_that_is_dead_or_fails_gets_no_stand_in() -> None:
    status = 200

    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"error": {"code": "its own"}}, status)

    never: dict[str, Any] = {"check_interval_s": 60, "breaker_failures": 99}
    async with Mock(answer) as one, Mock(answer) as two, gateway(one, two, **never) as made:
        everything = wanted(homes.tag_of(two.url))
        for status in (502, 503):
            assert await ask(made.port, everything[0]) == (status, "its own")
        await two.die()
        for wants in everything:  # no check has told yet
            assert await ask(made.port, wants) == (503, "no_worker")
        made.fleet.went_down(made.fleet.workers[two.url], "a check failed")
        for wants in everything:
            assert await ask(made.port, wants) == (503, "no_worker")
    assert not one.asked


async def test_who_waits_for_one_worker_keeps_nobody_from_another() -> None:
    held = asyncio.Event()

    async def answer(asked: Asked, out: Out) -> None:
        if b"hold" in asked.body:
            await held.wait()
        await out.json({"ok": True})

    tiers = {"default": TierSpec(queue_s=60)}
    async with Mock(answer) as one, Mock(answer) as two:
        registry = StaticRegistry([WorkerSpec(url=mock.url, max_requests=1) for mock in (one, two)])
        made_with: dict[str, Any] = {"registry": registry, "doorkeeper": Doorkeeper((), tiers)}
        async with (
            gateway(**made_with) as made,
            Call(made.port) as first,
            Call(made.port) as second,
        ):
            everything = wanted(homes.tag_of(two.url))
            body = everything[0][1]
            await first.send({**body, "input": "hold"}, RESPONSES)
            await until(lambda: len(two.asked) == 1, "two is full")
            await second.send(body, RESPONSES)
            await until(lambda: len(made.queue) == 1, "the second waits")
            assert (await call(made.port, {"model": "m", "input": "hi"}, RESPONSES)).status == 200
            assert await ask(made.port, everything[1]) == (200, "")  # needs no room
            assert [asked.target for asked in one.asked] == [RESPONSES]
            held.set()
            for waiting in (first, second):
                assert (await waiting.whole()).status == 200
    assert len(two.asked) == 3


@pytest.mark.parametrize(("again", "pays"), [(True, 4), (False, 502)])
async def test_a_stream_that_goes_on_is_not_paid_twice(
    again: bool, pays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the worker began anew, for it resumes none."""

    async def answer(asked: Asked, out: Out) -> None:
        name = asked.headers["last-event-id"].rpartition(".")[0]
        await out.head(extra=f"x-headrace-stream-id: {name}\r\n" if again else "")
        for text in "ab":
            await out.event(chunk_of(text))
        await out.event({"choices": [], "usage": usage_of(500, 2, 0)})
        await out.event("[DONE]")
        await out.end()

    paid: list[int] = []

    def settle(self: Reservation, used_tokens: int, now_s: float) -> None:
        paid.append(used_tokens)

    monkeypatch.setattr(Reservation, "settle", settle)
    async with Mock(answer) as worker, gateway(worker) as made:
        stream = homes.stream_id(0, homes.tag_of(worker.url))
        headers = {"last-event-id": f"{stream}.1"}
        reply = await call(made.port, {"model": "m", "stream": True}, CHAT, headers)
        assert reply.body.count(b"data: ") == 3  # the client did not ask for its usage
        assert await metric(made, "tokens_total", kind="prompt") == (0 if again else 500)
    assert paid[0] == pays


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_stream_whose_last_event_was_seen_goes_on_with_nothing(method: str) -> None:
    """An answer like any other: no fault of the worker, and nothing is missing."""

    async def answer(asked: Asked, out: Out) -> None:
        name = asked.headers["last-event-id"].rpartition(".")[0]
        await out.head(extra=f"x-headrace-stream-id: {name}\r\n")
        await out.end()

    async with Mock(answer) as worker, gateway(worker, breaker_failures=2) as made:
        stream = homes.stream_id(0, homes.tag_of(worker.url))
        headers = {"last-event-id": f"{stream}.9"}
        body = {"model": "m", "stream": True} if method == "POST" else None
        path = CHAT if method == "POST" else f"/v1/streams/{stream}"
        for _ in range(4):
            reply = await call(made.port, body, path, headers, method)
            assert (reply.status, reply.body) == (200, b"")
            assert reply.headers["content-type"].startswith("text/event-stream")
        assert await metric(made, "worker_failures_total") == 0
        assert await metric(made, "streams_without_end_total") == 0
    assert len(worker.asked) == 4

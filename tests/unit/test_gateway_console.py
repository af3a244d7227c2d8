"""What operators ask of a gateway: the terms of scores, rows, who may have them, and the page."""

from __future__ import annotations

import asyncio
import math
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.gateway import page
from headrace.gateway.app import Gateway
from headrace.gateway.board import Board
from headrace.gateway.console import JOINED, joined
from headrace.gateway.policy import POLICIES
from headrace.gateway.registry import StaticRegistry
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.siblings import Siblings
from headrace.gateway.tenants import Doorkeeper, KeySpec, TierSpec
from headrace.gateway.terms import TERMS, Decided, terms_of
from headrace.gateway.view import Ask, FleetView, Knobs
from headrace.web_page import load_files
from tests.unit.gateway_rig import (
    Asked,
    Call,
    Mock,
    Out,
    Reply,
    answer_well,
    call,
    chat,
    gateway,
    get,
    until,
    usage_of,
)
from tests.unit.test_gateway_policy import knobs, views

HERE = {"host": "127.0.0.1:8080"}
LONG = "a beginning that is long enough to be thought of as held. " * 40


async def look(port: int, path: str, **headers: str) -> Reply:
    """As a program of this machine."""
    return await get(port, path, {**HERE, **headers})


# ------------------------------------------------------------ terms


@given(data=st.data(), view=views, some=knobs, name=st.sampled_from(sorted(POLICIES)))
def test_the_terms_of_every_policy_add_up_to_its_scores(
    data: st.DataObject, view: FleetView, some: Knobs, name: str
) -> None:
    prompt_tokens = data.draw(st.integers(1, 10**6))
    n = len(view.workers)
    cached = tuple(data.draw(st.lists(st.integers(0, prompt_tokens), min_size=n, max_size=n)))
    ask = Ask(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        draw=data.draw(st.floats(0, 1, exclude_max=True)),
        session=data.draw(st.sampled_from(["", "anna"])),
    )
    choice = POLICIES[name](view, ask, some)
    made = Decided(view, choice, prompt_tokens, cached)
    for at, score in enumerate(choice.scores):
        terms = terms_of(name, made, at, some)
        if math.isfinite(score):
            sizes = [abs(term.adds) for term in terms]
            allowed = 1e-9 * max(1.0, *sizes, abs(score))
            assert sum(term.adds for term in terms) == pytest.approx(score, abs=allowed)
        else:
            assert not terms


def test_every_policy_has_terms() -> None:
    assert TERMS.keys() == POLICIES.keys()


# ------------------------------------------------------------ rows


async def test_a_decision_tells_its_terms_and_who_was_left_out() -> None:
    async with Mock() as one, Mock() as two, gateway(one, two) as made:
        made.fleet.workers[two.url].draining = True
        await call(made.port, chat(LONG), headers={"x-request-id": "first"})
        told = (await look(made.port, "/gateway/decisions/first")).json()
        assert (told["tenant"], told["policy"], told["status"]) == ("", "token_cost", 200)
        attempt = told["attempts"][0]
        assert attempt["left_out"] == [{"worker": two.url, "why": "draining"}]
        (candidate,) = attempt["candidates"]
        assert candidate["kv_usage"] is None, "nobody was asked"
        names = [term["name"] for term in candidate["terms"]]
        assert names == ["pending uncached tokens", "decoding tokens", "own tokens"]
        assert sum(term["adds"] for term in candidate["terms"]) == candidate["score"]


def keys_of(said: Any) -> set[str]:
    """Of all objects in it."""
    if isinstance(said, list):
        return set().union(*map(keys_of, said))
    own = set(said) if isinstance(said, dict) else set()
    return own.union(*map(keys_of, said.values())) if own else own


async def test_the_page_of_routes_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway-page.md").read_text()
    named = set(re.findall(r"\b[a-z_]+\b", page.partition("## The routes beneath it")[2]))
    async with Mock() as one, Mock() as two, gateway(one, two) as made:
        made.fleet.workers[two.url].draining = True
        for _ in range(2):
            await call(made.port, chat(LONG), headers={"x-request-id": "asked"})
        for path in (*made.console.routes, "/gateway/decisions/asked"):
            said = (await look(made.port, path)).json()
            assert keys_of(said) <= named, (path, keys_of(said) - named)


async def test_why_a_worker_was_no_candidate() -> None:
    async def fails(asked: Asked, out: Out) -> None:
        await out.json({"error": {"message": "broken"}}, 500)

    async with Mock(fails) as one, Mock() as two, gateway(one, two, breaker_failures=1) as made:
        worker = made.fleet.workers[one.url]
        assert worker.why_not(0.0) == ""
        worker.breaker.failed(0.0)
        assert worker.why_not(0.0) == "breaker open"
        worker.draining = True
        assert worker.why_not(0.0) == "draining"
        worker.up = False
        assert worker.why_not(0.0) == "down"
        worker.draining, worker.up = False, True
        worker.breaker.succeeded()
        full = made.fleet.workers[two.url]
        full.spec = type(full.spec)(url=two.url, max_requests=1)
        assert full.why_not(0.0) == ""


async def silent(asked: Asked, out: Out) -> None:
    """Never finds anything in its cache."""
    await out.json({"choices": [], "usage": usage_of(500, 2, 0)})


async def test_the_newest_decisions_and_misses_that_were_silent() -> None:
    async with Mock(silent) as one, gateway(one) as made:
        for i in range(3):
            await call(made.port, chat(LONG if i else "short"), headers={"x-request-id": f"r{i}"})
        await call(made.port, chat(LONG), headers={"x-request-id": "again"})
        rows = (await look(made.port, "/gateway/decisions")).json()["decisions"]
        assert [row["id"] for row in rows] == ["again", "r2", "r1", "r0"]
        assert [row["cached_tokens"]["silent_miss"] for row in rows] == [True, True, False, False]
        missed = rows[0]["cached_tokens"]
        assert (missed["confirmed"], missed["index"]) == (0, "fallback")
        assert missed["predicted"] >= 128
        rows = (await look(made.port, "/gateway/decisions?silent=1&limit=1")).json()["decisions"]
        assert [row["id"] for row in rows] == ["again"]


async def test_decisions_are_fewer_where_each_has_many_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.gateway.decisions.MOST_CANDIDATES", 5)
    async with Mock() as one, Mock() as two, gateway(one, two) as made:
        for name in ("a", "b", "b", "a", "c"):
            await call(made.port, chat(), headers={"x-request-id": name})
        rows = (await look(made.port, "/gateway/decisions")).json()["decisions"]
        assert [row["id"] for row in rows] == ["c", "a"]
        told = (await look(made.port, "/gateway/decisions/a")).json()
        assert (told["key"], told["same_id"]) == (rows[1]["key"], [])
        assert (await look(made.port, "/gateway/decisions/b")).status == 404


async def test_requests_of_one_id_have_a_record_each() -> None:
    """Those that run at once, and those that come later."""
    go_on = asyncio.Event()

    async def answer(asked: Asked, out: Out) -> None:
        said = asked.json()["messages"][0]["content"]
        if said == "slow":
            await go_on.wait()
        await out.json({"choices": [], "usage": usage_of(len(said), 2, 0)})

    mine = {"x-request-id": "mine"}
    async with Mock(answer) as one, gateway(one) as made, Call(made.port) as slow:
        await slow.send(chat("slow"), headers=mine)
        await until(lambda: len(one.asked) == 1, "it runs")
        await call(made.port, chat("quick!"), headers=mine)
        rows = (await look(made.port, "/gateway/decisions")).json()["decisions"]
        assert [(row["id"], row["status"], row["attempts"]) for row in rows] == [
            ("mine", 200, 1),
            ("mine", None, 1),
        ]
        go_on.set()
        assert (await slow.whole()).status == 200
        await call(made.port, chat("later on"), headers=mine)
        told = (await look(made.port, "/gateway/decisions/mine")).json()
        assert told["worker_said"]["prompt_tokens"] == len("later on"), "the newest"
        assert [same["key"] for same in told["same_id"]] == [row["key"] for row in rows]
        sizes = []
        for row in rows:
            each = (await look(made.port, f"/gateway/decisions/{row['key']}")).json()
            assert each["at_s"] == row["at_s"]
            assert len(each["same_id"]) == 2
            sizes.append(each["worker_said"]["prompt_tokens"])
        assert sizes == [len("quick!"), len("slow")]
        for wrong in ("mine~", "mine~x", f"other~{rows[0]['key'].partition('~')[2]}"):
            assert (await look(made.port, f"/gateway/decisions/{wrong}")).status == 404


async def test_an_id_is_found_however_its_path_is_written() -> None:
    async with Mock() as one, gateway(one) as made:
        await call(made.port, chat("hi"), headers={"x-request-id": "a:b.c"})
        for name in ("a:b.c", "a%3Ab.c", "%61%3ab%2Ec"):
            assert (await look(made.port, f"/gateway/decisions/{name}")).json()["id"] == "a:b.c"
        key = (await look(made.port, "/gateway/decisions/a:b.c")).json()["key"]
        for name in (key, key.replace("~", "%7E")):
            assert (await look(made.port, f"/gateway/decisions/{name}")).json()["key"] == key
        for name in ("a%253Ab.c", "%ff", "%", "%zz"):
            assert (await look(made.port, f"/gateway/decisions/{name}")).status == 404


async def test_one_id_in_two_processes(tmp_path: Path) -> None:
    """It stands for the newest of both, whichever is asked."""
    siblings = [Siblings(tmp_path, 2, own) for own in range(2)]
    async with (
        Mock() as a,
        gateway(a, siblings=siblings[0]) as one,
        gateway(a, siblings=siblings[1]) as two,
    ):
        for made in (one, two, one):
            await call(made.port, chat(), headers={"x-request-id": "mine"})
        rows = (await look(two.port, "/gateway/decisions")).json()["decisions"]
        keys = [row["key"] for row in rows]
        assert len(set(keys)) == 3
        for made in (one, two):
            told = (await look(made.port, "/gateway/decisions/mine")).json()
            assert (told["key"], [same["key"] for same in told["same_id"]]) == (keys[0], keys[1:])
            for key in keys:
                assert (await look(made.port, f"/gateway/decisions/{key}")).json()["key"] == key


async def finds(asked: Asked, out: Out) -> None:
    """As many cached tokens as the prompt names."""
    named = int(asked.json()["messages"][0]["content"].split()[-1])
    await out.json({"choices": [], "usage": usage_of(1000, 2, named)})


async def test_how_predictions_did() -> None:
    async with Mock(finds) as one, gateway(one) as made:
        for found in (0, 10, 5000, 0, 1):
            await call(made.port, chat(f"{LONG} {found}"))
        rows = (await look(made.port, "/gateway/decisions")).json()["decisions"]
        said = (await look(made.port, "/gateway/predictions")).json()
        predicted = [row["cached_tokens"]["predicted"] for row in reversed(rows)]
        assert predicted[0] == 0 < 128 < min(predicted[1:]) < 5000
        assert said["states"]["fallback"] == {
            "equal": 1,
            "under": 1,
            "over": 3,
            "silent_misses": 1,
        }
        assert not any(said["states"]["exact"].values())
        assert said["tokens"] == {
            "prompt": 5000,
            "cached": 5011,
            "predicted_cached": sum(predicted),
        }


@given(target=st.binary(max_size=40))
def test_any_query_is_answered_or_refused(target: bytes) -> None:
    console = Gateway(GatewaySettings(), StaticRegistry(()), Doorkeeper((), {})).console
    for path in console.routes:
        with suppress(InvalidRequest):
            told = console.tell(path.encode() + b"?" + target)
            assert joined(path.encode(), [told]) if path in JOINED else told


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/gateway/decisions?limit=0", "limit"),
        ("/gateway/decisions?limit=1001", "limit"),
        ("/gateway/decisions?limit=x", "limit"),
        ("/gateway/decisions?limit=%C2%B2", "limit"),
        ("/gateway/decisions?limit=%D9%A3", "limit"),
        ("/gateway/decisions?silent=yes", "silent"),
        ("/gateway/decisions?other=1", "other"),
        ("/gateway/queue?limit=1", "limit"),
        ("/gateway/workers?x", "x"),
        ("/gateway/tenants?limit=-1", "limit"),
    ],
)
async def test_another_query_is_refused(path: str, param: str) -> None:
    async with Mock() as one, gateway(one) as made:
        said = await look(made.port, path)
        assert (said.status, said.json()["error"]["param"]) == (400, param)


KEYS = (
    KeySpec(key="boss", tenant="boss", admin=True),
    KeySpec(key="anna", tenant="anna", tier="paid"),
)
TIERS = {"paid": TierSpec(requests_per_min=60, tokens_per_min=10_000, parallel=4, priority=-1)}


async def test_tenants_and_who_waits() -> None:
    hold = asyncio.Event()

    async def held(asked: Asked, out: Out) -> None:
        await hold.wait()
        await answer_well(asked, out)

    boss, anna = ({"authorization": f"Bearer {key}"} for key in ("boss", "anna"))
    doorkeeper = Doorkeeper(KEYS, TIERS)
    async with Mock(held) as one, gateway(one, doorkeeper=doorkeeper, max_requests=1) as made:
        calls = [asyncio.create_task(call(made.port, chat("x"), headers=anna)) for _ in range(3)]
        await until(lambda: len(made.queue) == 2, "two wait")
        queue = (await look(made.port, "/gateway/queue", **boss)).json()
        (line,) = queue["lines"]
        oldest_s = line.pop("oldest_s")
        assert oldest_s >= 0
        assert line == {
            "model": "m",
            "priority": -1,
            "tenant": "anna",
            "waiting": 2,
            "tier": "paid",
        }
        assert (queue["waiting"], queue["most"]) == (2, 1024)
        account = doorkeeper.tenants["anna"].account
        assert account.requests is not None
        assert account.tokens is not None
        buckets = account.requests, account.tokens
        before = [bucket.told(time.monotonic())[1] for bucket in buckets]
        said = (await look(made.port, "/gateway/tenants?limit=1", **boss)).json()
        after = [bucket.told(time.monotonic())[1] for bucket in buckets]
        assert said["known"] == 2
        (row,) = said["tenants"]
        assert row["served_tokens"] > 0
        assert (row["name"], row["tier"], row["priority"]) == ("anna", "paid", -1)
        assert (row["running"], row["waiting"], row["parallel"]) == (3, 2, 4)
        limits = row["requests_per_min"], row["tokens_per_min"]
        assert [one["limit"] for one in limits] == [60, 10_000]
        for least, shown, most in zip(before, limits, after, strict=True):
            assert least <= shown["remaining"] <= most
        (worker,) = (await look(made.port, "/gateway/workers", **boss)).json()["workers"]
        assert (worker["requests"], worker["max_requests"]) == (1, 1)
        assert (worker["index"], worker["state"]) == ("fallback", "up")
        hold.set()
        assert [reply.status for reply in await asyncio.gather(*calls)] == [200] * 3


# ------------------------------------------------------------ several processes


async def test_one_answer_of_several_processes(tmp_path: Path) -> None:
    Board.create(tmp_path / "board", 2)
    boards = [Board(tmp_path / "board", 2, own) for own in range(2)]
    first, second = (Siblings(tmp_path, 2, own) for own in range(2))
    keys = Doorkeeper((), {}), Doorkeeper((), {})
    async with (
        Mock() as one,
        gateway(one, siblings=first, board=boards[0], doorkeeper=keys[0]) as a,
        gateway(one, siblings=second, board=boards[1], doorkeeper=keys[1]) as b,
    ):
        for i in range(4):
            headers = {"x-request-id": f"r{i}"}
            await call((a, b)[i % 2].port, chat(f"{i}"), headers=headers)
        for made in (a, b):
            rows = (await look(made.port, "/gateway/decisions?limit=3")).json()["decisions"]
            assert [row["id"] for row in rows] == ["r3", "r2", "r1"]
            (tenant,) = (await look(made.port, "/gateway/tenants")).json()["tenants"]
            alone = [some.queue.served_of("") for some in (a, b)]
            assert tenant["served_tokens"] == sum(alone) > max(alone)
            assert (await look(made.port, "/gateway/queue")).json()["most"] == 2048
            told = (await look(made.port, "/gateway/predictions")).json()
            assert told["tokens"]["prompt"] == 40
            assert told["states"]["fallback"]["equal"] == 4
            refused = await look(made.port, "/gateway/decisions?limit=0")
            assert refused.status == 400
    for board in boards:
        board.close()


# ------------------------------------------------------------ the page


async def test_the_page_and_all_that_it_names() -> None:
    async with Mock() as one, gateway(one) as made:
        sent = await look(made.port, "/gateway/ui")
        assert sent.status == 200
        assert sent.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in sent.headers["content-security-policy"]
        named = re.findall(r'(?:href|src)="(ui/[^"]+)"', sent.body.decode())
        assert len(named) > 5
        for path in named:
            found = await look(made.port, f"/gateway/{path}")
            assert found.status == 200, path
            assert "immutable" in found.headers["cache-control"]
        moved = await look(made.port, "/gateway/ui/")
        assert (moved.status, moved.headers["location"]) == (308, "../ui")
        version = load_files()[0]
        for path in ("files/0/js/dom.js", f"files/{version}/none", "x", f"files/{version}/../x"):
            assert (await look(made.port, f"/gateway/ui/{path}")).status == 404
        assert (await call(made.port, None, "/gateway/ui", HERE)).status == 405


DATA = tuple(f"/gateway/{name}" for name in ("decisions", "lint", "queue", "tenants"))
DATA += ("/gateway/predictions",)


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        ({}, {}, 200),
        ({}, {"host": "localhost:1"}, 200),
        ({}, {"host": "evil.example"}, 403),
        ({}, {"origin": "http://evil.example"}, 403),
        ({}, {"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}, 403),
        ({"host": "0.0.0.0"}, {}, 403),
        ({"ui": False}, {}, 404),
    ],
)
async def test_who_gets_the_page_without_keys(
    settings: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    async with Mock() as one, gateway(one, **settings) as made:
        assert (await look(made.port, "/gateway/ui", **headers)).status == status
        for path in DATA:
            wanted = 200 if status == 404 else status  # the API is there without the page
            assert (await look(made.port, path, **headers)).status == wanted, path


@pytest.mark.parametrize(
    ("host", "shown", "keyed", "told"),
    [
        ("127.0.0.1", True, False, True),
        ("::1", True, False, True),
        ("0.0.0.0", True, False, False),
        ("0.0.0.0", True, True, True),
        ("127.0.0.1", False, True, False),
    ],
)
def test_its_address_is_told_where_it_is_shown(
    host: str, shown: bool, keyed: bool, told: bool
) -> None:
    address = page.address("http://x:1", host, shown=shown, keyed=keyed)
    assert address == ("http://x:1/gateway/ui" if told else "")


async def test_with_keys_the_page_is_everybodys_and_what_it_shows_an_admins() -> None:
    doorkeeper = Doorkeeper(KEYS, TIERS)
    async with Mock() as one, gateway(one, doorkeeper=doorkeeper, host="0.0.0.0") as made:
        assert (await get(made.port, "/gateway/ui", {"host": "any.example"})).status == 200
        for path in DATA:
            for key, status in ((None, 401), ("anna", 403), ("boss", 200)):
                shown = {"authorization": f"Bearer {key}"} if key else {}
                assert (await get(made.port, path, shown)).status == status, (path, key)

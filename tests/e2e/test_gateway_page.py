"""The gateway's page in a real browser: workers that do what a test tells them, and a real one."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from headrace.gateway.app import Gateway
from headrace.gateway.registry import Apply, StaticRegistry
from headrace.gateway.settings import WorkerSpec
from headrace.gateway.tenants import Doorkeeper, KeySpec, TierSpec
from tests.devices import WITHOUT_BROWSER
from tests.e2e.browser import browser, visit
from tests.e2e.serve_process import ServeProcess
from tests.e2e.test_page_use import ALL, check
from tests.unit.gateway_rig import Asked, Mock, Out, answer_well, gateway, usage_of

pytestmark = pytest.mark.skipif(bool(WITHOUT_BROWSER), reason=WITHOUT_BROWSER)
LONG = "A beginning that is long enough to be thought of as held by somebody. " * 40
HOSTILE = "<img src=x onerror=pwned=1>"
KEYS = (
    KeySpec(key="boss", tenant="boss", admin=True),
    KeySpec(key="anna", tenant="anna", tier="paid"),
)
LONG_S = 600.0  # nothing is over before a test on a slow machine is
PAID = TierSpec(
    requests_per_min=600, tokens_per_min=100_000, parallel=9, priority=-1, queue_s=LONG_S
)
TIERS = {"paid": PAID}
# Gateway and workers share a thread: one that waits for the processor is not taken for a hung one.
CALM: dict[str, Any] = {"check_timeout_s": LONG_S, "hung_after_s": LONG_S, "starve_s": LONG_S}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


class Fleet:
    """A gateway that runs in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, made: Gateway) -> None:
        self._loop, self.made = loop, made
        self.port = made.port
        self.url = f"http://127.0.0.1:{made.port}/gateway"

    def inside(self, call: Callable[[], Any]) -> Any:
        """Do something in the gateway's thread."""
        done: asyncio.Future[Any] = asyncio.run_coroutine_threadsafe(_called(call), self._loop)  # type: ignore[assignment]
        return done.result(LONG_S)  # type: ignore[call-arg]

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def chat(self, text: str, name: str, **headers: str) -> int:
        """One request, answered whole; its status."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        return self.ask("POST", "/v1/chat/completions", body, x_request_id=name, **headers)[0]

    def get(self, path: str, **headers: str) -> dict[str, Any]:
        status, said = self.ask("GET", path, **headers)
        assert status == 200, said
        return said


async def _called(call: Callable[[], Any]) -> Any:
    return call()


@contextmanager
def fleet(*workers: Mock, **options: Any) -> Iterator[Fleet]:
    """A gateway before these workers, or those of `registry`, in a thread of its own."""
    ready = threading.Event()
    made: list[Fleet] = []
    end: list[Callable[[], Any]] = []
    failed: list[BaseException] = []

    async def run() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        async with _mocks(workers), gateway(*workers, **CALM, **options) as running:
            if running.lint is not None:
                running.lint._clock = lambda: 0.0  # else a slow machine would sample
            made.append(Fleet(loop, running))
            end.append(lambda: loop.call_soon_threadsafe(ended.set))
            ready.set()
            await ended.wait()

    def thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    running = threading.Thread(target=thread)
    running.start()
    ready.wait()
    try:
        if made:
            yield made[0]
    finally:
        for call in end:
            call()
        running.join()
        for error in failed:
            raise error


@asynccontextmanager
async def _mocks(workers: tuple[Mock, ...]) -> AsyncIterator[None]:
    for worker in workers:
        await worker.listen()
    try:
        yield
    finally:
        for worker in workers:
            await worker.die()


async def forgets(asked: Asked, out: Out) -> None:
    """A worker that never finds anything in its cache."""
    await out.json({"choices": [], "usage": usage_of(700, 2, 0)})


def cells(rows: Locator) -> list[list[str]]:
    """The texts of a table's rows."""
    return [row.locator("td").all_inner_texts() for row in rows.all()]


def facts(within: Locator) -> dict[str, str]:
    """Terms and values of the lists in it."""
    terms, values = within.locator("dl dt"), within.locator("dl dd")
    return dict(zip(terms.all_inner_texts(), values.all_inner_texts(), strict=True))


def open_decision(page: Page, name: str) -> Locator:
    """Its view, when the page knows that the request has ended."""
    page.locator(".ring-row", has=page.locator(f"[title='{name}']")).first.click()
    expect(page.locator(f"#view-decision[data-of='{name}'][data-status='200']")).to_be_visible()
    return page.locator("#view-decision")


def test_a_decision_with_every_term(chromium: Browser) -> None:
    one, two, away = Mock(), Mock(), Mock()
    with fleet(one, two, away) as made:
        away_worker = made.made.fleet.workers[away.url]
        made.inside(lambda: setattr(away_worker, "draining", True))
        for i in range(2):
            assert made.chat(f"{LONG}{i}", f"r{i}") == 200
        told = made.get("/gateway/decisions/r1")
        with visit(chromium, made.url) as seen:
            page = seen.page
            view = open_decision(page, "r1")
            attempt = told["attempts"][0]
            rows = view.locator("tbody tr")
            expect(rows).to_have_count(2)
            marked = view.locator("tr.mine")
            expect(marked).to_have_count(1)
            expect(marked).to_contain_text(attempt["worker"])
            names = [term["name"] for term in attempt["candidates"][0]["terms"]]
            heads = view.locator("th").all_inner_texts()
            assert [name for name in heads if name in names] == names
            for shown, candidate in zip(cells(rows), attempt["candidates"], strict=True):
                assert shown[0] == candidate["name"]
                assert shown[2] == "FALLBACK"
                products = [part.split(" = ") for part in shown[4 : 4 + len(names)]]
                for (product, adds), term in zip(products, candidate["terms"], strict=True):
                    value, weight = map(float, product.split(" × "))
                    assert value == term["value"]
                    assert weight == pytest.approx(term["weight"], rel=1e-3)
                    assert float(adds) == pytest.approx(term["adds"], rel=1e-3)
                score = float(shown[4 + len(names)])
                assert score == pytest.approx(candidate["score"], rel=1e-3)
            expect(view).to_contain_text(f"{away.url} (draining)")
            said = facts(view)
            assert said["predicted"] == str(told["cached_tokens"]["predicted"])
            assert said["engine says"] == str(told["cached_tokens"]["confirmed"])


def test_decisions_of_one_id(chromium: Browser) -> None:
    with fleet(Mock()) as made:
        for text in ("first", "second"):
            assert made.chat(text, "mine") == 200
        newest, first = made.get("/gateway/decisions")["decisions"]
        with visit(chromium, made.url, "#/decision/mine") as seen:
            page = seen.page
            rows = page.locator(".ring-row")
            expect(rows).to_have_count(2)
            marked = page.locator(".ring-row[aria-selected='true']")
            expect(marked).to_have_attribute("data-id", newest["key"])
            page.locator("#view-decision .same-id a").click()
            expect(marked).to_have_attribute("data-id", first["key"])
            expect(page.locator("#view-decision[data-of='mine']")).to_be_visible()


def test_misses_that_were_silent(chromium: Browser) -> None:
    one = Mock(forgets)
    with fleet(one) as made:
        for i in range(3):
            assert made.chat(LONG if i else "short", f"r{i}") == 200
        with visit(chromium, made.url) as seen:
            page = seen.page
            expect(page.locator(".ring-row")).to_have_count(3)
            told = made.get("/gateway/predictions")["states"]["fallback"]
            assert told["silent_misses"] == 1
            counts = [str(number) for number in told.values()]
            assert cells(page.locator("#predictions tbody tr"))[-1] == ["FALLBACK", *counts]
            page.get_by_label("silent misses alone").check()
            expect(page.locator(".ring-row")).to_have_count(1)
            view = open_decision(page, "r2")
            expect(view.locator(".verdict.problem")).to_contain_text("a silent miss")
            expect(view).to_contain_text("none of it")
            page.get_by_label("silent misses alone").uncheck()
            expect(page.locator(".ring-row")).to_have_count(3)
            page.goto(f"{made.url}/ui#/decision/none")
            expect(view.locator(".problem")).to_contain_text("none: no such decision is kept")
            page.goto(f"{made.url}/ui#/decision/another")
            expect(view.locator(".problem")).to_contain_text("another: no such decision is kept")


@pytest.mark.parametrize("excerpts", [False, True])
def test_prompts_that_part_early(chromium: Browser, excerpts: bool) -> None:
    one = Mock(forgets)
    doorkeeper = Doorkeeper(KEYS, TIERS)
    with fleet(one, doorkeeper=doorkeeper, lint_excerpts=excerpts) as made:
        for i in range(4):
            text = f"{HOSTILE} It is 2026-11-28T16:0{i}:00Z. {LONG}"
            assert made.chat(text, f"r{i}", authorization="Bearer anna") == 200
        with visit(chromium, made.url, "#/lint") as seen:
            page = seen.page
            page.get_by_label("API key").fill("boss")
            page.keyboard.press("Enter")
            expect(page.locator("#view-lint[data-looked='4']")).to_be_visible()
            boss = {"authorization": "Bearer boss"}
            (row,) = made.get("/gateway/lint", **boss)["tenants"]
            (found,) = row["findings"]
            part = page.locator("[data-tenant=anna]")
            assert facts(part)["prompts looked at"] == "4 of 4"
            expect(part.locator("tbody tr")).to_have_count(1)
            (shown,) = cells(part.locator("tbody tr"))
            assert shown[0] == f"messages[0].content, character {found['characters']}"
            assert shown[1].startswith("a date or a time")
            assert shown[-4] == "3"
            assert shown[-2] == str(found["lost_tokens"])
            assert (f"16:0{found['seen']}:00Z" in shown[2]) is excerpts
            assert page.evaluate("window.pwned") is None
            if excerpts:
                check(page, "lint", None, ALL)
            part.get_by_role("link").focus()
            text = f"{HOSTILE} It is 2026-11-28T16:09:00Z. {LONG}"
            assert made.chat(text, "r4", authorization="Bearer anna") == 200
            expect(page.locator("#view-lint[data-looked='5']")).to_be_visible()
            expect(part.get_by_role("link")).to_be_focused()  # though the table is another one
            page.keyboard.press("Enter")
            expect(page.locator("#view-decision[data-of='r4']")).to_be_visible()


class Name:
    """A DNS name that is not answered any more."""

    url, targets, why = "dns://workers.example:80", ("a", "b"), HOSTILE
    counts: ClassVar[dict[str, int]] = {}

    def age_s(self, now_s: float) -> float:
        return 5.0


class OfAName:
    """The registry of two workers that a name stood for; each takes one request."""

    names = (Name(),)

    def __init__(self, workers: list[Mock]) -> None:
        self._workers = workers

    def start(self, apply: Apply) -> None:
        apply([WorkerSpec(url=worker.url, max_requests=1) for worker in self._workers])

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_the_fleet_as_the_gateway_says(chromium: Browser) -> None:
    hold = threading.Event()

    async def held(asked: Asked, out: Out) -> None:
        await asyncio.to_thread(hold.wait)
        await answer_well(asked, out)

    one, two = Mock(held), Mock(held)
    doorkeeper = Doorkeeper(KEYS, TIERS)
    registry = OfAName([one, two])
    anna = {"authorization": "Bearer anna"}
    boss = {"authorization": "Bearer boss"}
    with fleet(one, two, doorkeeper=doorkeeper, registry=registry) as made:
        calls = [
            threading.Thread(target=made.chat, args=(HOSTILE, f"r{i}"), kwargs=anna)
            for i in range(5)
        ]
        for call in calls:
            call.start()
        try:
            with visit(chromium, made.url, "#/fleet") as seen:
                page = seen.page
                unlock(page)
                row = page.locator("#queue tbody tr")
                expect(row.locator("td").nth(4)).to_have_text("3")  # two are at workers
                assert row.locator("td").all_inner_texts()[:4] == ["paid", "-1", "anna", "m"]
                first = page.locator("#tenants tbody tr").first
                expect(first).to_contain_text("anna")
                expect(first).to_contain_text("5 of 9")
                left = made.get("/gateway/tenants", **boss)["tenants"][0]["requests_per_min"]
                assert left["limit"] == 600
                expect(first).to_contain_text("of 600")
                workers = page.locator("#workers table").first.locator("tbody tr")
                for at in range(2):
                    expect(workers.nth(at).locator("td").nth(4)).to_have_text("1 of 1")
                told = {row["name"]: row for row in made.get("/gateway/workers", **boss)["workers"]}
                for shown in cells(workers):
                    worker = told[shown[0]]
                    assert shown[1:4] == ["up", "closed", "FALLBACK"]
                    assert shown[4:6] == ["1 of 1", "1"]
                    assert shown[8] == str(worker["pending_tokens"])
                told_name = page.locator("#workers table").last.locator("tbody td")
                assert told_name.all_inner_texts()[:2] == ["dns://workers.example:80", "2"]
                assert told_name.last.inner_text() == HOSTILE
                made.ask("POST", "/gateway/drain", {"worker": one.url, "drain": True}, **boss)
                expect(workers.filter(has_text=one.url)).to_contain_text("draining")
                made.ask("POST", "/gateway/drain", {"worker": one.url, "drain": False}, **boss)
                expect(workers.filter(has_text=one.url).locator("td").nth(1)).to_have_text("up")
                breaker = made.made.fleet.workers[two.url].breaker
                for _ in range(5):
                    made.inside(partial(breaker.failed, 1e12))
                expect(workers.filter(has_text=two.url)).to_contain_text("open")
                made.inside(breaker.succeeded)
                warms_up = made.made.fleet.workers[two.url]
                warms_up._slow_start_s, warms_up.up_since_s = 1e9, time.monotonic()
                expect(workers.filter(has_text=two.url)).to_contain_text(
                    "slow start: 5 % of its share"
                )
                assert page.evaluate("window.pwned") is None
                hold.set()
                expect(page.locator("#queue")).to_contain_text("0 of at most")
        finally:
            hold.set()
            for call in calls:
                call.join()


def unlock(page: Page) -> None:
    """A key that is none, one that is no operator's, and an operator's."""
    for key, words in (("other", "does not know"), ("anna", "key of an admin")):
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text=words)).to_be_visible()
    page.get_by_label("API key").fill("boss")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_cached_tokens_that_a_real_engine_confirms(
    chromium: Browser, default_server: ServeProcess
) -> None:
    model = "smollm2-135m-instruct"
    with fleet(registry=StaticRegistry([WorkerSpec(url=default_server.url)])) as made:
        body = {"model": model, "prompt": LONG, "max_tokens": 1, "temperature": 0}
        for i in range(2):
            status, said = made.ask("POST", "/v1/completions", body, x_request_id=f"real-{i}")
            assert status == 200, said
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 100
        with visit(chromium, made.url, "#/decision/real-1") as seen:
            view = seen.page.locator("#view-decision[data-of='real-1'][data-status='200']")
            expect(view).to_be_visible()
            assert facts(view)["engine says"] == str(cached)
            prompt_tokens = str(said["usage"]["prompt_tokens"])
            assert facts(view)["prompt as the worker counts"] == prompt_tokens


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_left_out(chromium: Browser, scheme: Any) -> None:
    """By keyboard, by screen reader, in both schemes."""
    one, two = Mock(forgets), Mock(forgets)
    with fleet(one, two) as made:
        for i in range(3):
            assert made.chat(LONG, f"r{i}") == 200
        with visit(chromium, made.url, scheme=scheme) as seen:
            page, keys = seen.page, seen.page.keyboard
            expect(page.locator("#workers tbody tr")).to_have_count(2)
            expect(page.locator(".ring-row")).to_have_count(3)
            check(page, "fleet", None, ALL)
            page.locator("#skip").focus()
            keys.press("Enter")
            expect(page.locator("#work")).to_be_focused()
            page.locator(".ring-row[tabindex='0']").focus()
            keys.press("End")
            expect(page.locator(".ring-row[aria-selected='true']")).to_have_attribute(
                "data-id", re.compile("^r0~")
            )
            expect(page.locator("#view-decision[data-of='r0']")).to_be_visible()
            expect(page.locator("#to-decision")).to_have_attribute("aria-current", "page")
            keys.press("Home")
            expect(page.locator("#view-decision[data-of='r2']")).to_be_visible()
            check(page, "decision", None, ALL)
            page.locator("#theme").focus()
            keys.press("Enter")
            expect(page.locator("html")).to_have_attribute("data-theme", "light")

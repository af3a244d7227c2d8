"""The live page for those who use it otherwise, behind a key, and while the server is busy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.devices import WITHOUT_BROWSER
from tests.e2e.browser import browser, visit
from tests.e2e.serving import Server

pytestmark = pytest.mark.skipif(bool(WITHOUT_BROWSER), reason=WITHOUT_BROWSER)
KEY = "a-key-of-this-test"
AT_ONCE = 64
SERIOUS = {"serious", "critical"}
ALL = {"resultTypes": ["violations"]}
WITHOUT_COLOURS = {**ALL, "rules": {"color-contrast": {"enabled": False}}}  # its dearest rule
COLOURFUL = (2, 3, 5)  # marks of the template, tokens, the rows of this request


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Slow steps, and room for all that 64 requests can write: none ends or is preempted."""
    rows = AT_ONCE + 1
    with Server(
        fake_step_ms=50.0, max_num_seqs=rows, kv_blocks=rows * 256, api_key=(KEY,)
    ) as running:
        yield running


def unlock(page: Page) -> None:
    """Give the key."""
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()


def ask(page: Page, text: str) -> None:
    """One request from the chat, to its end."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .note").last).to_have_text("length")


def settle(page: Page) -> None:
    """Short answers, which do not end before their limit."""
    page.get_by_text("Sampling, schema, system").click()
    page.get_by_label("max_tokens").fill("8")
    page.get_by_label("seed").fill("1")
    page.get_by_text("Sampling, schema, system").click()


def test_the_key_stays_in_the_tab(chromium: Browser, server: Server) -> None:
    with visit(chromium, server.url) as seen:
        page = seen.page
        expect(page.get_by_role("dialog")).to_be_visible()
        page.get_by_label("API key").fill("another")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="does not know")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_visible()
        unlock(page)
        expect(page.locator("#model")).to_have_text("fake")
        expect(page.locator(".stage")).to_have_count(11)
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert KEY not in page.url


def busy(server: Server, count: int, name: str = "") -> list[socket.socket]:
    """That many requests with that id that run until their socket is closed."""
    raw = b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {KEY}\r\nx-request-id: {name}\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    sockets = []
    for _ in range(count):
        opened = socket.create_connection(("127.0.0.1", server.port))
        opened.sendall(head.encode() + raw)
        sockets.append(opened)
    return sockets


def test_it_answers_while_64_requests_run(chromium: Browser, server: Server) -> None:
    with visit(chromium, server.url, "#/fleet") as seen:
        page = seen.page
        unlock(page)
        settle(page)
        sockets = busy(server, AT_ONCE)
        try:
            running = page.locator("#pulse dd").first
            expect(running).to_have_text(str(AT_ONCE))
            expect(page.locator(".fleet tbody tr").last).to_be_visible()
            page.locator("#to-request").click()
            ask(page, "hello")
            for number in (5, 7, 10, 3):
                page.locator(f"#stage-{number}").click()
                expect(page.locator(f"#stage-panel[data-stage='{number}']")).to_be_visible()
            page.locator("#stage-5").click()
            first = page.locator(".pair section").first
            expect(first.locator("tbody tr")).to_have_count(64)  # its most; of 65 rows
            expect(first).to_contain_text("and 1 more rows")
            expect(page.locator(".ring-row")).to_have_count(50)
            expect(running).to_have_text(str(AT_ONCE))  # all this while they ran
        finally:
            for opened in sockets:
                opened.close()
        expect(running).to_have_text("0")


def focused(page: Page) -> str:
    """What has the focus, in a word."""
    found: str = page.evaluate(
        "(n => n.id || n.dataset.id || n.name || n.textContent || n.className)"
        "(document.activeElement)"
    )
    return found


def test_all_of_it_by_keyboard(chromium: Browser, server: Server) -> None:
    with visit(chromium, server.url) as seen:
        page, keys = seen.page, seen.page.keyboard
        unlock(page)
        settle(page)
        expect(page.locator(".stage")).to_have_count(11)
        page.locator("#ask-text").focus()
        keys.type("by keyboard")
        keys.press("Enter")
        expect(page.locator(".turn.assistant .note")).to_have_text("length")
        expect(page.locator("#stage-panel[data-state=done]")).to_be_visible()  # it changes no more
        page.locator("#skip").focus()
        path = ["skip"]
        while path[-1] != "stage-1" and len(path) < 20:
            keys.press("Tab")
            path.append(focused(page))
        order = ["skip", "to-request", "to-fleet", "theme", "New chat", "ask-text", "stage-1"]
        places = [path.index(name) for name in order]
        assert places == sorted(places), path
        page.locator("#stage-1").focus()
        keys.press("ArrowRight")
        keys.press("ArrowRight")
        assert focused(page) == "stage-3"
        expect(page.locator("#stage-panel")).to_have_attribute("data-stage", "3")
        keys.press("Tab")  # the panel, then its tokens: one stop for all
        keys.press("Tab")
        keys.press("End")
        last = page.locator(".tok").last
        expect(last).to_be_focused()
        expect(page.locator(".said-of")).to_contain_text("id ")
        page.locator("#stage-3").focus()
        keys.press("End")
        assert focused(page) == "stage-11"
        keys.press("Home")
        assert focused(page) == "stage-1"
        page.locator("#skip").focus()
        keys.press("Enter")
        expect(page.locator("#work")).to_be_focused()
        page.locator(".ring-row[tabindex='0']").focus()
        keys.press("ArrowDown")
        assert page.locator(".ring-row[aria-selected='true']").count() == 1
        page.locator("#theme").focus()
        keys.press("Enter")
        expect(page.locator("html")).to_have_attribute("data-theme", "light")


def post_as(server: Server, name: str, count: int) -> list[str]:
    """A request of so many tokens with that id; keys of those that have it, newest first."""
    head = {"authorization": f"Bearer {KEY}", "x-request-id": name, "x-headrace-record": "full"}
    asked = {"prompt": "x", "max_tokens": count, "ignore_eos": True}
    assert server.request("POST", "/v1/completions", asked, head)[0] == 200
    listed = json.loads(server.request("GET", "/ui/api/requests", headers=head)[2])
    return [one["key"] for one in listed if one["id"] == name]


def test_requests_of_one_id(chromium: Browser, server: Server) -> None:
    post_as(server, "mine", 2)
    newest, first = post_as(server, "mine", 3)
    with visit(chromium, server.url, "#/request/mine/11") as seen:
        page = seen.page
        unlock(page)
        expect(page.locator(".ring-row .id", has_text="mine")).to_have_count(2)
        marked, panel = (
            page.locator(".ring-row[aria-selected='true']"),
            page.locator("#stage-panel"),
        )
        output = panel.locator("dl div", has=page.get_by_text("output", exact=True)).locator("dd")
        for open_it, key, count in (
            (None, newest, "3"),
            (panel.locator(".same-id a"), first, "2"),
            (panel.locator(".same-id a"), newest, "3"),
            (page.locator(f".ring-row[data-id='{first}']"), first, "2"),
        ):
            if open_it is not None:
                open_it.click()
            expect(panel).to_have_attribute("data-of", key)
            expect(marked).to_have_attribute("data-id", key)
            expect(panel).to_have_attribute("data-stage", "11")
            expect(output).to_have_text(count)
        for stage, label in ((5, "Step"), (10, "Draw")):  # what is chosen in one is its own
            page.locator(f"#stage-{stage}").click()
            slider = panel.get_by_label(label, exact=True)
            slider.fill("1")
            panel.locator(".same-id a").click()
            expect(panel).to_have_attribute("data-of", newest)
            expect(slider).to_have_value("0")
            panel.locator(".same-id a").click()
            expect(panel).to_have_attribute("data-of", first)
            expect(slider).to_have_value("1")


def test_a_newer_request_of_an_id_takes_no_place(chromium: Browser, server: Server) -> None:
    (opened,) = busy(server, 1, "again")
    with visit(chromium, server.url, "#/request/again/11") as seen:
        page = seen.page
        unlock(page)
        panel = page.locator("#stage-panel")
        expect(panel).to_have_attribute("data-state", "running")
        first = panel.get_attribute("data-of")
        assert post_as(server, "again", 1)[1] == first
        opened.close()
        expect(page.locator(f"#stage-panel[data-of='{first}'][data-state=done]")).to_be_visible()
        page.goto(f"{server.url}/ui#/request/none/11")
        expect(panel).to_contain_text("no request 'none'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_left_out(chromium: Browser, server: Server, scheme: Any) -> None:
    """Whatever has colours of its own is looked at in both schemes; structure once."""
    with visit(chromium, server.url, scheme=scheme) as seen:
        page = seen.page
        expect(page.get_by_role("dialog")).to_be_visible()
        check(page, "login")
        unlock(page)
        settle(page)
        ask(page, "is it for all")
        check(page, "request")
        for number in COLOURFUL if scheme == "dark" else range(2, 12):
            page.locator(f"#stage-{number}").click()
            expect(page.locator(f"#stage-panel[data-stage='{number}']")).to_be_visible()
            wanted = ALL if number in COLOURFUL else WITHOUT_COLOURS
            check(page, f"stage {number}", "#stage-panel", wanted)
        page.locator("#to-fleet").click()
        expect(page.locator(".fleet table").first).to_be_visible()
        check(page, "fleet", ".fleet")


def check(page: Page, where: str, part: Any = None, wanted: Any = None) -> None:
    """axe-core finds nothing that is serious, in all of the page or in a part of it."""
    if not page.evaluate("'axe' in window"):  # kept in the page: reading it costs as much as a look
        page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    look = "async ([part, wanted]) => (await axe.run(part ?? document, wanted)).violations"
    found = page.evaluate(look, [part, wanted or ALL])
    serious = [
        (one["id"], one["help"], [node["html"][:200] for node in one["nodes"][:3]])
        for one in found
        if one["impact"] in SERIOUS
    ]
    assert not serious, f"{where}: {serious}"

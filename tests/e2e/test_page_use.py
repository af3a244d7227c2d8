"""The live page for those who use it otherwise, behind a key, and while the server is busy."""

from __future__ import annotations

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


def busy(server: Server, count: int) -> list[socket.socket]:
    """That many requests that run until their socket is closed."""
    raw = b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {KEY}\r\ncontent-length: {len(raw)}\r\n\r\n"
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

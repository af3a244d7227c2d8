"""Parts of the live page: its parser of events, what it makes visible, its rest when hidden."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from headrace.web_page import load_files
from tests.devices import WITHOUT_BROWSER
from tests.e2e.browser import browser, visit
from tests.e2e.serving import Server

pytestmark = pytest.mark.skipif(bool(WITHOUT_BROWSER), reason=WITHOUT_BROWSER)

STREAM = (
    ": hello\n\ndata: one\r\n\r\nid: 3\ndata:two\ndata:  2\n\n"
    "data: three\r\revent: x\n\ndata: é\n\n"
)
EVENTS = ["one", "two\n 2", "three", "é"]
CUT = """async ([url, stream]) => {
    const { EventParser } = await import(url);
    const found = new Set();
    for (let first = 0; first <= stream.length; first += 1)
        for (let second = first; second <= stream.length; second += 1) {
            const parser = new EventParser();
            const cuts = [[0, first], [first, second], [second, stream.length]];
            const read = cuts.flatMap(([from, to]) => parser.feed(stream.slice(from, to)));
            found.add(JSON.stringify(read));
        }
    return [...found].map((one) => JSON.parse(one));
}"""
SEEN = """async ([url, text]) => (await import(url)).visible(text)"""


@pytest.fixture(scope="module")
def page(shared_server: Server) -> Iterator[Page]:
    with browser() as chromium, visit(chromium, shared_server.url) as seen:
        yield seen.page


def module(page: Page, name: str) -> str:
    """Its address."""
    return f"{page.url.partition('#')[0]}/files/{load_files()[0]}/js/{name}"


def test_events_are_the_same_however_they_are_cut(page: Page) -> None:
    assert page.evaluate(CUT, [module(page, "sse.js"), STREAM]) == [EVENTS]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a b\n", "a·b↵\n"),
        ("\t\r\x7f", "→␍␡"),
        ("\u202e\u200b\ufeff\x00\x9b\u2066", "‹202E›‹200B›‹FEFF›‹0000›‹009B›‹2066›"),
        ("é 水 😀 <b>", "é·水·😀·<b>"),
    ],
)
def test_what_only_steers_can_be_seen(page: Page, text: str, seen: str) -> None:
    assert page.evaluate(SEEN, [module(page, "dom.js"), text]) == seen


def hide(page: Page, hidden: bool) -> None:
    """As if another tab were in front."""
    page.evaluate(
        "value => { Object.defineProperty(document, 'hidden', {value, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange')) }",
        hidden,
    )


def test_a_hidden_tab_asks_for_nothing(page: Page) -> None:
    page.clock.install()
    page.reload()
    expect(page.locator("#pulse dd").first).to_have_text("0")
    with page.expect_event("requestfailed", lambda request: "ui/api/live" in request.url):
        hide(page, True)  # its stream is given up
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(60_000)  # of the page's own clock: it would have looked sixty times
    assert page.evaluate("document.hidden")
    assert asked == []
    with page.expect_request("**/ui/api/live"):
        hide(page, False)

"""A real browser for tests of the live page: Chromium without a window, driven by playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.devices import BROWSER

PATIENCE_MS = 60_000  # of one thing that should come at once
# No name but this machine's is looked up: what leaves the host fails, and the page's test sees it.
ONLY_THIS_HOST = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@contextmanager
def browser() -> Iterator[Browser]:
    """One for all tests of a module: a start costs a second."""
    arguments = [ONLY_THIS_HOST, "--disable-gpu", "--disable-background-networking"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium refuses to run as root with it
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        try:
            yield running
        finally:
            running.close()


class Visit:
    """A page of a server, watched: what it asked for, and what went wrong in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.faults: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._said)
        page.on("request", lambda request: self.asked.append(request.url))

    def _said(self, message: Any) -> None:
        # A refused request is an answer that the page shows; Chromium also says so itself.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def check(self) -> None:
        """Nothing failed, and nothing was asked of another host."""
        assert not self.faults
        assert self.asked
        assert {url for url in self.asked if not url.startswith(self.url)} == set()


@contextmanager
def visit(
    running: Browser,
    url: str,
    hash_: str = "",
    *,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1440,
) -> Iterator[Visit]:
    """The page of the server at `url` in a profile of its own; checked at the end."""
    context = running.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    seen = Visit(page, url)
    try:
        page.goto(f"{url}/ui{hash_}")
        yield seen
        seen.check()
    finally:
        context.close()

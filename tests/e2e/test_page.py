"""The live page in a real browser, on a real server with the real default model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.devices import WITHOUT_BROWSER
from tests.e2e.browser import browser, visit
from tests.e2e.serve_process import ServeProcess

pytestmark = pytest.mark.skipif(bool(WITHOUT_BROWSER), reason=WITHOUT_BROWSER)
QUESTION = "Name a colour."


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


def greedy(text: str, most: int) -> dict[str, object]:
    """A body whose answer is always the same."""
    message = {"role": "user", "content": text}
    return {"messages": [message], "temperature": 0, "max_tokens": most}


def test_a_chat_streams(chromium: Browser, default_server: ServeProcess) -> None:
    with visit(chromium, default_server.url) as seen:
        page = seen.page
        expect(page.locator("#model")).to_have_text("smollm2-135m-instruct")
        page.get_by_text("Sampling, schema, system").click()
        page.get_by_label("temperature").fill("0")
        page.get_by_label("max_tokens").fill("12")
        page.get_by_label("Message", exact=True).fill(QUESTION)
        page.keyboard.press("Enter")
        answer = page.locator(".turn.assistant").first
        expect(answer.locator(".note")).to_have_text("length")
        _, whole = default_server.post("/v1/chat/completions", greedy(QUESTION, 12))
        expect(answer.locator(".said:not(.thought)")).to_have_text(
            whole["choices"][0]["message"]["content"]
        )
        shown = dict(
            zip(
                page.locator(".gauges dt").all_inner_texts(),
                page.locator(".gauges dd").all_inner_texts(),
                strict=True,
            )
        )
        assert shown["tokens"] == "12"
        assert shown["TTFT"].endswith("ms")
        assert shown["speed"].endswith("tok/s")
        assert shown["cached"].endswith(f"of {whole['usage']['prompt_tokens']}")


def test_an_answer_is_stopped_and_a_new_chat_begun(
    chromium: Browser, default_server: ServeProcess
) -> None:
    with visit(chromium, default_server.url) as seen:
        page = seen.page
        page.get_by_label("Message", exact=True).fill("Count to a thousand in words.")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.assistant .said:not(.thought)")).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".turn.assistant .note")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)

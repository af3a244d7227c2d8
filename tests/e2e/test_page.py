"""The live page in a real browser, on a real server with the real default model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from headrace.stages import STAGES
from tests.devices import WITHOUT_BROWSER
from tests.e2e.browser import browser, visit
from tests.e2e.serve_process import ServeProcess

pytestmark = pytest.mark.skipif(bool(WITHOUT_BROWSER), reason=WITHOUT_BROWSER)
QUESTION = "Name a colour, and say why you like it."
SEED = str(2**53 - 1)  # the largest that a page's number holds
SAID = ".turn.assistant .said:not(.thought)"
HOSTILE = "<script>pwned=1</script><img src=x onerror=pwned=1>\u202e</div>"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


def body(text: str, **fields: Any) -> dict[str, Any]:
    """Of a chat request."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def ask(page: Page, text: str, **fields: str) -> Locator:
    """Send it from the page's chat; the answer's turn, when it has ended."""
    if fields and not page.get_by_label("temperature").is_visible():
        page.get_by_text("Sampling, schema, system").click()
    for name, value in fields.items():
        page.locator(f".draws [name={name}]").fill(value)
    turns = page.locator(".turn.assistant")
    answer = turns.nth(turns.count())
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(answer.locator(".note, .problem").filter(has_text=re.compile("."))).to_be_visible()
    return answer


def figures(within: Locator) -> dict[str, str]:
    """Terms and values of the lists in it."""
    terms, values = within.locator("dl dt"), within.locator("dl dd")
    return dict(zip(terms.all_inner_texts(), values.all_inner_texts(), strict=True))


def record_of(page: Page, server: ServeProcess) -> dict[str, Any]:
    """What the API says of the request that is open, when the page knows that it has ended."""
    identity = page.url.split("/")[-2]
    expect(page.locator(f"#stage-panel[data-of^='{identity}~'][data-state=done]")).to_be_visible()
    status, text = server.get(f"/ui/api/requests/{identity}")
    assert status == 200, text
    return dict(json.loads(text))


def open_stage(page: Page, number: int) -> Locator:
    """The panel of a stage, open."""
    page.locator(f"#stage-{number}").click()
    panel = page.locator(f"#stage-panel[data-stage='{number}']")
    expect(panel.get_by_role("heading", level=2)).to_have_text(f"{number}{STAGES[number - 1].name}")
    return panel


def shown_visibly(text: str) -> str:
    """A token's text as the page writes it."""
    return text.replace("\n", "↵\n").replace(" ", "·")


def test_a_chat_streams(chromium: Browser, default_server: ServeProcess) -> None:
    with visit(chromium, default_server.url) as seen:
        page = seen.page
        expect(page.locator("#model")).to_have_text("smollm2-135m-instruct")
        assert f"look: {default_server.url}/ui" in default_server.said
        answer = ask(page, QUESTION, temperature="0", max_tokens="12")
        expect(answer.locator(".note")).to_have_text("length")
        _, whole = default_server.post(
            "/v1/chat/completions", body(QUESTION, temperature=0, max_tokens=12)
        )
        said = whole["choices"][0]["message"]["content"]
        assert page.locator(SAID).inner_text() == said
        shown = figures(page.locator(".ask"))
        assert shown["tokens"] == "12"
        assert shown["TTFT"].endswith("s")
        assert shown["speed"].endswith("tok/s")
        assert shown["cached"].endswith(f"of {whole['usage']['prompt_tokens']}")
        # the next turn brings the conversation along
        ask(page, "Another one.", max_tokens="3")
        record = record_of(page, default_server)
        assert said in record["prompt"]["text"]
        assert QUESTION in record["prompt"]["text"]
        seed = figures(open_stage(page, 2))["seed"]
        assert seed == str(record["params"]["seed"])  # all the 64 bits that the server drew


def test_an_answer_is_stopped_and_a_new_chat_begun(
    chromium: Browser, default_server: ServeProcess
) -> None:
    with visit(chromium, default_server.url) as seen:
        page = seen.page
        page.get_by_text("Sampling, schema, system").click()
        endless = {"type": "array", "items": {"type": "integer"}, "minItems": 4000}
        page.locator(".draws [name=schema]").fill(json.dumps(endless))
        page.get_by_label("Message", exact=True).fill("Count.")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(SAID)).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".turn.assistant .note")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        expect(
            page.locator(".ring-row .label").filter(has_text="client_gone").first
        ).to_be_visible()
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)


def test_every_stage_opens_with_the_data_of_the_request(
    chromium: Browser, default_server: ServeProcess
) -> None:
    with visit(chromium, default_server.url) as seen:
        page = seen.page
        ask(page, QUESTION, max_tokens="20", temperature="0.8", top_p="0.9", seed=SEED)
        record = record_of(page, default_server)
        assert record["state"] == "done"
        for number, check in enumerate(CHECKS, start=1):
            check(open_stage(page, number), record, default_server)


def check_route(panel: Locator, record: dict[str, Any], _: ServeProcess) -> None:
    shown = figures(panel)
    assert (shown["request"], shown["endpoint"]) == (record["id"], "/v1/chat/completions")
    assert panel.locator("tbody tr").count() == len(record["times_ms"])


def check_prepare(panel: Locator, record: dict[str, Any], _: ServeProcess) -> None:
    shown = panel.locator(".prompt").evaluate("node => node.textContent")
    assert shown.replace("↵\n", "\n") == record["prompt"]["text"]
    assert QUESTION in panel.locator(".prompt .content").all_inner_texts()
    assert figures(panel)["seed"] == str(record["params"]["seed"]) == SEED


def check_tokenize(panel: Locator, record: dict[str, Any], server: ServeProcess) -> None:
    _, counted = server.post("/tokenize", body(QUESTION))
    ids = [int(one) for one in panel.locator(".tok .id").all_inner_texts()]
    assert ids == counted["tokens"]
    texts = [one.evaluate("n => n.textContent") for one in panel.locator(".tok .what").all()[:8]]
    assert texts == [shown_visibly(token["text"]) for token in record["tokens"]["prompt"][:8]]
    chip = panel.locator(".tok").nth(4)
    chip.click()
    raw = record["tokens"]["prompt"][4]["bytes"]
    pairs = " ".join(raw[at : at + 2] for at in range(0, len(raw), 2))
    expect(panel.locator(".said-of")).to_contain_text(f"id {ids[4]}   bytes {pairs}")


def check_embed(panel: Locator, record: dict[str, Any], _: ServeProcess) -> None:
    shown = figures(panel)
    assert float(shown["theta"]) == record["positions"]["theta"]
    assert int(shown["last"]) == record["positions"]["last"]
    row = panel.locator("tbody tr").nth(5).locator("td")
    assert row.all_inner_texts()[:2] == ["5", str(record["tokens"]["prompt"][5]["id"])]


def check_schedule(panel: Locator, record: dict[str, Any], _: ServeProcess) -> None:
    steps = record["steps"]
    slider = panel.get_by_label("Step", exact=True)
    assert slider.get_attribute("max") == str(len(steps) - 1)
    panel.get_by_role("button", name="Next").click()
    cards = panel.locator(".pair section")
    for card, step in zip(cards.all(), steps[1:3], strict=True):
        assert card.get_by_role("heading").inner_text().endswith(f"#{step['step']}")
        shown = figures(card)
        assert shown["tokens"] == str(step["tokens"])
        assert shown["KV blocks"] == str(step["kv_used"])
        mine = next(row for row in step["rows"] if row["mine"])
        cells = card.locator("tr.mine td").all_inner_texts()
        assert cells[:4] == ["this one", mine["kind"], str(mine["start"]), str(mine["count"])]


def check_prefill(panel: Locator, record: dict[str, Any], _: ServeProcess) -> None:
    rows = [row.locator("td").all_inner_texts() for row in panel.locator("tbody tr").all()]
    assert sum(int(row[2]) for row in rows) == record["usage"]["prompt_tokens"]
    assert figures(panel)["from the cache"] == f"{record['usage']['cached_tokens']} tokens"


def check_cache(panel: Locator, record: dict[str, Any], _: ServeProcess) -> None:
    table = record["blocks"]["table"]
    assert panel.locator(".cell").all_inner_texts() == [str(block) for block, _ in table]
    kinds = panel.locator("tbody tr td:nth-child(2)").all_inner_texts()
    assert kinds == [event["kind"] for event in record["blocks"]["events"]]
    expect(panel.locator(".kv-map")).to_have_attribute("aria-label", re.compile(r"of \d+ blocks"))


def check_attend(panel: Locator, record: dict[str, Any], _: ServeProcess) -> None:
    own = [row for step in record["steps"] for row in step["rows"] if row["mine"]]
    assert panel.locator("tbody tr").count() == len(own)
    last = panel.locator("tbody tr").last.locator("td").all_inner_texts()
    keys = own[-1]["start"] + 1
    assert last[2:4] == [str(keys), str(-(-keys // record["blocks"]["block_size"]))]


def check_decode(panel: Locator, record: dict[str, Any], server: ServeProcess) -> None:
    ids = [int(one) for one in panel.locator(".tok .id").all_inner_texts()]
    assert ids == [token["id"] for token in record["tokens"]["output"]]
    _, back = server.post("/detokenize", {"tokens": ids})
    said = panel.page.locator(SAID).evaluate("node => node.textContent")
    assert back["prompt"].startswith(said)
    assert said


def check_sample(panel: Locator, record: dict[str, Any], _: ServeProcess) -> None:
    panel.get_by_role("button", name="Next").click()
    draw = record["draws"][1]
    assert figures(panel)["id"] == str(draw["token"])
    sieves = panel.locator(".sieve")
    names = [sieve.get_attribute("data-stage") for sieve in sieves.all()]
    assert names == [stage["name"] for stage in draw["stages"]]
    assert {"logits", "temperature", "top_p", "softmax"} <= set(names)
    for sieve, stage in zip(sieves.all(), draw["stages"], strict=True):
        ids = [int(str(item.get_attribute("data-id"))) for item in sieve.locator("li").all()]
        assert ids == [one["id"] for one in stage["top"]]
    among = [stage for stage in draw["stages"] if draw["token"] in {t["id"] for t in stage["top"]}]
    marked = panel.locator(".sieve li.drawn").all()
    assert [one.get_attribute("data-id") for one in marked] == [str(draw["token"])] * len(among)


def check_stream(panel: Locator, record: dict[str, Any], _: ServeProcess) -> None:
    shown = figures(panel)
    assert shown["output"] == str(record["usage"]["completion_tokens"])
    assert shown["ended by"] == record["finish_reasons"][0]
    left = [one.evaluate("n => n.textContent") for one in panel.locator("td .text").all()]
    assert left == [shown_visibly(one["emitted"]) for one in record["text"]]


CHECKS = (
    check_route,
    check_prepare,
    check_tokenize,
    check_embed,
    check_schedule,
    check_prefill,
    check_cache,
    check_attend,
    check_decode,
    check_sample,
    check_stream,
)


def test_a_request_of_another_client_is_in_the_list(
    chromium: Browser, default_server: ServeProcess
) -> None:
    asked = {"prompt": "A", "max_tokens": 2, "ignore_eos": True}
    status, whole = default_server.post("/v1/completions", asked)
    assert status == 200, whole
    with visit(chromium, default_server.url, "#/request//5") as seen:
        page = seen.page
        page.locator(".ring-row", has_text="/v1/completions").first.click()
        panel = page.locator("#stage-panel")
        expect(panel).to_contain_text("recorded lightly")
        expect(open_stage(page, 11)).to_contain_text("Usage and cost")
        assert figures(panel)["output"] == "2"


def test_what_a_model_says_is_text(chromium: Browser, default_server: ServeProcess) -> None:
    with visit(chromium, default_server.url) as seen:
        page = seen.page
        schema = json.dumps({"const": HOSTILE})  # so the model says exactly this
        ask(page, f"{HOSTILE} Say it.", schema=schema, temperature="0", max_tokens="99")
        said = page.locator(SAID).evaluate("node => node.textContent")
        assert json.loads(said) == HOSTILE
        for number in range(1, 12):
            open_stage(page, number)
        panel = open_stage(page, 11)  # half of the character waits for the other half
        expect(panel.locator(".held").first).to_contain_text("bytes e2")
        assert "‹202E›" in panel.locator("table").inner_text()
        assert page.evaluate("window.pwned") is None
        inside = page.locator("#chat, #work, #ring").locator("script, img, iframe")
        assert inside.count() == 0


def test_a_hundred_thousand_characters_at_once(
    chromium: Browser, default_server: ServeProcess
) -> None:
    pieces = [f"{HOSTILE} {at} " for at in range(2000)]
    chunks = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    stream = "".join([*events, "data: [DONE]\n\n"])
    with visit(chromium, default_server.url) as seen:
        page = seen.page
        page.route(
            re.compile("/v1/chat/completions$"),
            lambda route: route.fulfill(content_type="text/event-stream", body=stream),
        )
        answer = ask(page, "x")
        expect(answer.locator(".note")).to_have_text("stop")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        said = page.locator(SAID).evaluate("node => node.textContent")
        assert said == "".join(pieces)
        assert len(said) > 100_000
        assert page.evaluate("window.pwned") is None
        page.unroute_all()
        refused = ask(page, HOSTILE * 2000)  # and what does not fit is refused, as text
        expect(refused.locator(".problem")).to_contain_text("tokens")

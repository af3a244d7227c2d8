"""Event writers of responses and messages against any sequence of parts: order, numbers, sums."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.answer import Answer
from headrace.api.logprobs import Reporter
from headrace.api.message_blocks import blocks_of
from headrace.api.messages import Head, MessageEvents
from headrace.api.response_output import Output, Reply, ResponseEvents
from headrace.errors import RequestFailed
from headrace.text.parts import Arguments, Call, Part, Reasoning, Text, joined

USAGE = {
    "prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
}  # fmt: skip
ANSWER = cast(
    Answer,
    SimpleNamespace(
        usage=lambda: USAGE, reasoning_tokens=2, choices=[SimpleNamespace(finish="stop")]
    ),
)
REPORTER = cast(Reporter, None)


@st.composite
def part_lists(draw: st.DrawFn) -> list[list[Part]]:
    """As a parser gives them: arguments follow their call, in pieces, cut into feeds."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from("trc"), max_size=6)):
        text = draw(st.text('aé\n"{', min_size=1, max_size=4))
        if kind == "t":
            parts += [Text(char) for char in text]
        elif kind == "r":
            parts += [Reasoning(char) for char in text]
        else:
            arguments = json.dumps({"x": text})
            cut = draw(st.integers(0, len(arguments)))
            pieces = [piece for piece in (arguments[:cut], arguments[cut:]) if piece]
            parts += [Call(calls, f"call{calls}", f"f{calls}")]
            parts += [Arguments(calls, piece) for piece in pieces]
            calls += 1
    feeds: list[list[Part]] = []
    while parts:
        size = draw(st.integers(1, len(parts)))
        feeds.append(joined(parts[:size]))
        parts = parts[size:]
    return feeds


def decoded(raw: bytes) -> list[dict[str, Any]]:
    out = []
    for block in filter(None, raw.decode().split("\n\n")):
        name, data = block.split("\n")
        out.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {out[-1]['type']}"
    return out


def written(events: ResponseEvents | MessageEvents, feeds: list[list[Part]], fail: bool) -> bytes:
    raw = b"".join(events.begin(ANSWER))
    for feed in feeds:
        raw += b"".join(events.parts(0, feed))
    if fail:
        return raw + events.failed(RequestFailed("broken"))
    raw += events.finish(0, "stop", None)
    asyncio.run(events.ended(ANSWER))
    return raw + events.end(ANSWER)


@settings(max_examples=60)
@given(part_lists(), st.booleans())
def test_responses(feeds: list[list[Part]], fail: bool) -> None:
    async def save(answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
        return Reply("resp_1", {"store": True}).ended(answer, output, stored=True)

    reply = Reply("resp_1", {"store": True})
    events = decoded(written(ResponseEvents(reply, REPORTER, 0, save), feeds, fail))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == ("response.failed" if fail else "response.completed")
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert len(texts) == len(items), "the item before is done"
            assert event["output_index"] == len(items)
            items.append(event["item"])
            texts.append("")
            continue
        assert event["output_index"] == len(items) - 1
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        if kind.endswith(".delta"):
            texts[-1] += event["delta"]
        elif kind == "response.output_item.done":
            items[-1] = event["item"]
            assert text_of(items[-1]) == texts[-1]
        elif kind.endswith((".text.done", ".arguments.done")):
            assert event.get("text", event.get("arguments")) == texts[-1]
    whole = Output()
    for part in joined(part for feed in feeds for part in feed):
        whole.add(part)
    whole.close()
    shown = last["response"]["output"]
    assert [text_of(item) for item in shown] == [text_of(item) for item in whole.items]
    if not fail:
        assert shown == items
        assert all(item["status"] == "completed" for item in shown)
    else:
        assert last["response"]["error"] == {"code": "request_failed", "message": "broken"}


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


@settings(max_examples=60)
@given(part_lists(), st.booleans())
def test_messages(feeds: list[list[Part]], fail: bool) -> None:
    head = Head("msg_1", "fake", False)
    events = decoded(written(MessageEvents(head), feeds, fail))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    if fail:
        assert events[-1]["error"] == {"type": "api_error", "message": "broken"}
        events = events[:-1]
    else:
        assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        events = events[:-2]
    blocks: list[dict[str, Any]] = []
    open_ = False
    for event in events[2:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not open_
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"pieces": []})
            open_ = True
            continue
        assert open_
        assert event["index"] == len(blocks) - 1
        if kind == "content_block_stop":
            open_ = False
        else:
            delta = event["delta"]
            assert delta["type"] in DELTAS[blocks[-1]["type"]]
            if delta["type"] != "signature_delta":
                blocks[-1]["pieces"].append(delta[DELTAS[blocks[-1]["type"]][delta["type"]]])
    assert open_ <= fail
    expected = blocks_of(joined(part for feed in feeds for part in feed))
    assert len(blocks) == len(expected)
    for block, whole in zip(blocks, expected, strict=True):
        said = "".join(block["pieces"])
        if block["type"] == "tool_use":
            assert (block["name"], json.loads(said)) == (whole["name"], whole["input"])
        else:
            assert said == whole[block["type"]]


DELTAS: dict[str, dict[str, str]] = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


def test_arguments_that_were_cut_short_are_shown_as_they_are() -> None:
    parts: list[Part] = [Call(0, "c", "f"), Arguments(0, '{"x": ')]
    (block,) = blocks_of(parts)
    assert (block["input"], block["partial_json"]) == ({}, '{"x": ')

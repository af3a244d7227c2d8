"""The reader of passing event streams: cut anywhere, the bytes stay and the facts are the same."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.sse import MAX_EVENT_BYTES, EventStream, Usage

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def fed(stream: EventStream, data: bytes, cuts: list[int]) -> bytes:
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(at)]
    return b"".join([stream.feed(piece) for piece in pieces if piece]) + stream.flush()


texts = st.text(max_size=20).map(lambda t: t.replace("\r", "").replace("\n", ""))
payloads = st.one_of(
    texts.map(lambda t: json.dumps({"choices": [{"delta": {"content": t}}]}, ensure_ascii=False)),
    st.just(json.dumps({"choices": [{"delta": {"content": 'a "usage" and an "error"'}}]})),
)
events = st.one_of(
    payloads.map(lambda p: [f"data: {p}"]),
    payloads.map(lambda p: ["event: thing", f"data:{p}"]),
    texts.map(lambda t: [f": {t}"]),
    st.just(["data: {", "data: }"]),  # one payload in two lines
    st.just([f"data: {json.dumps({'choices': [], 'usage': USAGE})}"]),
    st.just(["id: 7", 'data: {"choices":[{"delta":{"content":",\\"usage\\":null}"}}]}']),
    st.just(["id: 8", 'data: {"choices":[],"usage":null}']),
    st.just(["data: [DONE]"]),
)


@given(
    st.lists(events, max_size=8),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 10_000), max_size=20),
    st.booleans(),
)
def test_b097_cut_anywhere(some: list[list[str]], end: str, cuts: list[int], strip: bool) -> None:
    data = "".join("".join(line + end for line in event) + end for event in some).encode()
    usage_event = ["data: " + json.dumps({"choices": [], "usage": USAGE})]
    kept = [event for event in some if not strip or event != usage_event]
    expected = "".join("".join(line + end for line in event) + end for event in kept).encode()
    if strip and end == "\n":  # as all workers write
        expected = expected.replace(b'"choices":[],"usage":null}', b'"choices":[]}')
    stream = EventStream(strip)
    assert fed(stream, data, cuts) == expected
    assert stream.ended == (["data: [DONE]"] in some)
    assert stream.error is None
    asked = (7, 3, 4) if usage_event in some else (-1, -1, -1)
    usage = stream.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == asked


def test_b097_a_line_without_end_takes_no_memory() -> None:
    """20 MB of one line, and the stream is read on behind it."""
    stream = EventStream(strip_usage=True)
    out, most = [stream.feed(b"data: ")], 0
    for _ in range(320):
        out.append(stream.feed(b"x" * 65536))
        most = max(most, len(stream._rest))
    assert most <= MAX_EVENT_BYTES + 65536
    assert stream.inside
    rest = b"\n\ndata: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
    for i in range(len(rest)):
        out.append(stream.feed(rest[i : i + 1]))
    out += [stream.feed(b"data: [DONE]\n\n"), stream.flush()]
    assert b"".join(out) == b"data: " + b"x" * 65536 * 320 + b"\n\ndata: [DONE]\n\n"
    assert (stream.usage.prompt_tokens, stream.ended) == (7, True)


@pytest.mark.parametrize(
    "event",
    [
        'data: {"error":{"message":"no","code":503}}\n\n',
        'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n',
        'event: error\ndata: {"type":"error","code":"x","message":"no"}\n\n',
        'data: {"error":"no"}\n\n',
    ],
)
def test_errors_of_every_protocol_are_seen(event: str) -> None:
    stream = EventStream(strip_usage=False)
    assert stream.feed(event.encode()) == event.encode()
    assert stream.error is not None
    assert not stream.ended


def test_no_error_where_none_is() -> None:
    stream = EventStream(strip_usage=False)
    stream.feed(b'data: {"error":null,"usage":null,"choices":[]}\n\n')
    stream.feed(b'data: {"choices":[{"delta":{"content":"{\\"error\\": 1}"}}]}\n\n')
    stream.feed(b'data: {"error": broken}\n\n')
    assert stream.error is None
    assert stream.usage.prompt_tokens == -1


def test_usage_and_ends_of_other_protocols() -> None:
    stream = EventStream(strip_usage=True)
    said = {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}
    stream.feed(b"event: message_start\ndata: " + json.dumps(said).encode() + b"\n\n")
    stream.feed(b'event: message_delta\ndata: {"usage":{"output_tokens":5}}\n\n')
    assert not stream.ended
    stream.feed(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert (stream.usage.prompt_tokens, stream.usage.output_tokens, stream.ended) == (9, 5, True)
    other = EventStream(strip_usage=True)
    done = {
        "response": {"usage": {"input_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}}
    }
    other.feed(b"event: response.completed\ndata: " + json.dumps(done).encode() + b"\n\n")
    assert (other.usage.prompt_tokens, other.usage.cached_tokens, other.ended) == (2, 1, True)


@pytest.mark.parametrize(
    ("said", "prompt", "cached"),
    [
        ({"prompt_tokens": 9, "cache_read_input_tokens": 4}, 9, 4),
        ({"input_tokens": 9}, 9, -1),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, 9, 4),
        ({"input_tokens": 5, "cache_read_input_tokens": 4}, 9, 4),
        ({"input_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3}, 9, 4),
        ({"input_tokens": 9, "cache_read_input_tokens": None}, 9, -1),
        ({"cache_read_input_tokens": 4}, -1, 4),
        ({"input_tokens": "9", "cache_read_input_tokens": 4}, -1, 4),
    ],
)
def test_what_a_cache_had_is_part_of_the_prompt(
    said: dict[str, Any], prompt: int, cached: int
) -> None:
    """Anthropic counts it apart, everybody else within."""
    usage = Usage()
    usage.read(said)
    assert (usage.prompt_tokens, usage.cached_tokens) == (prompt, cached)

"""From token deltas to text, finish reasons, usage and SSE bytes; no sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.api.answer import Answer, Reply
from headrace.api.chat import ChatChunks
from headrace.api.chunks import Chunks
from headrace.api.completions import CompletionChunks
from headrace.api.prepare import Prepared
from headrace.api.service import Service
from headrace.engine.client import EngineClient, Job
from headrace.engine.token_stream import Delta, TokenStream
from headrace.errors import ClientError, RequestFailed
from headrace.hooks.load import Hooks
from headrace.messages import Done, End, Reason
from headrace.sources.files import ModelFiles
from headrace.text.parts import Arguments, Call, Parser, Part, Reasoning, Text, ToolCall, said
from headrace.text.tokenizer import load_tokenizer

FAKE = load_tokenizer(ModelFiles("fake", "fake", Path()))
SERVICE = cast(Service, SimpleNamespace(tokenizer=FAKE, eos_ids=[256, 258], hooks=Hooks()))


class Wire:
    """What a TokenStream asks of its client, recorded."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def send_abort(self, handle: int) -> None:
        self.sent.append(("abort", handle))

    def send_finish(self, handle: int, choice: int, n_tokens: int) -> None:
        self.sent.append(("finish", handle, choice, n_tokens))


class Thinker:
    """A parser: all up to a full stop is reasoning; what is in brackets is a call."""

    def __init__(self) -> None:
        self.thinking = self.may_think = True
        self.called = False

    def feed(self, text: str) -> list[Part]:
        out: list[Part] = []
        for char in text:
            if self.thinking:
                out.append(Reasoning(char))
                self.thinking = self.may_think = char != "."
            elif char == "(":
                out.append(Call(0, "id", "f"))
            elif char == ")":
                self.called = True
            else:
                out.append(Arguments(0, char))
        return out

    def flush(self) -> list[Part]:
        return [Text("!")]


def make(
    stops: list[str] | None = None,
    n: int = 1,
    prompts: int = 1,
    include_stop: bool = False,
    parser: Callable[[], Parser] | None = None,
) -> tuple[Answer, TokenStream, Wire]:
    wire = Wire()
    stream = TokenStream(cast(EngineClient, wire), n, 0.0)
    for handle in range(prompts):
        stream.opened(handle)
    jobs = [Job([1, 2, 3], 100, n=n) for _ in range(prompts)]
    prepared = Prepared(jobs, n, stops or [], True, include_stop, [], parser=parser)
    return Answer(SERVICE, prepared, stream), stream, wire


def end(reason: Reason, stop_id: int = -1) -> End:
    return End(0, 0, reason, stop_id)


def test_a_stop_string_over_several_deltas() -> None:
    answer, _, wire = make(["lo w"])
    texts = [answer.feed(Delta(0, list(part))) for part in (b"hel", b"lo", b" world")]
    assert "".join(texts) == "hel"
    assert wire.sent == [("finish", 0, 0, 7)]
    choice = answer.choices[0]
    assert (choice.finish, choice.stop_reason, choice.text.n_tokens) == ("stop", "lo w", 7)
    assert answer.feed(Delta(0, list(b"more"), end("stop"))) == ""
    assert answer.usage()["completion_tokens"] == 7


def test_a_stop_string_in_the_last_delta_needs_no_finish_message() -> None:
    answer, _, wire = make(["b"])
    assert answer.feed(Delta(0, list(b"abc"), end("length"))) == "a"
    assert wire.sent == []
    assert answer.choices[0].finish == "stop"
    assert answer.usage()["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("stop_id", "include", "text", "reason"),
    [(258, False, "ab", None), (99, False, "ab", 99), (99, True, "abc", 99)],
)
def test_stop_ids(stop_id: int, include: bool, text: str, reason: int | None) -> None:
    answer, _, _ = make(include_stop=include)
    assert answer.feed(Delta(0, [97, 98, stop_id], end("stop", stop_id))) == text
    choice = answer.choices[0]
    assert (choice.finish, choice.stop_reason, choice.text.n_tokens) == ("stop", reason, 3)


def test_half_a_character_at_the_limit_is_one_replacement() -> None:
    answer, _, _ = make()
    raw = "é🐙".encode()
    assert answer.feed(Delta(0, list(raw[:4]))) == "é"
    assert answer.feed(Delta(0, [], end("length"))) == "�"
    assert answer.choices[0].finish == "length"


async def test_collect_keeps_prompts_and_samples_apart() -> None:
    answer, stream, _ = make(n=2, prompts=2)
    for index, word in enumerate((b"ab", b"cd", b"ef", b"gh")):
        for token in word:
            stream.push(index, token)
        stream.push_end(index, End(index // 2, index % 2, "length"))
    stream.push_done(Done(0, cached_tokens=2))
    stream.push_done(Done(1, cached_tokens=1))
    assert await answer.collect() == [[Text(word)] for word in ("ab", "cd", "ef", "gh")]
    assert answer.usage() == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("cut", [1, 2, 3, 11])
def test_parts_and_reasoning_tokens_do_not_depend_on_how_deltas_are_merged(cut: int) -> None:
    answer, _, wire = make(parser=Thinker)
    tokens = list(b"ab.(xyz)")
    parts: list[Part] = []
    for at in range(0, len(tokens), cut):
        parts += answer.parts(Delta(0, tokens[at : at + cut]))
    parts += answer.parts(Delta(0, [258], end("stop", 258)))
    assert said(parts) == said(
        [Reasoning("ab."), Call(0, "id", "f"), Arguments(0, "xyz"), Text("!")]
    )
    assert said(parts).calls == (ToolCall("id", "f", "xyz"),)
    assert answer.choices[0].finish == "tool_calls"
    assert answer.usage()["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert answer.parts(Delta(0, [97])) == []
    assert wire.sent == []


@pytest.mark.parametrize(
    ("text", "reason", "finish"),
    [(b"a.(x)", "length", "length"), (b"a.(x", "stop", "stop"), (b"a.(x)", "stop", "tool_calls")],
)
def test_a_call_that_is_not_whole_is_no_reason_to_end(
    text: bytes, reason: Reason, finish: str
) -> None:
    answer, _, _ = make(parser=Thinker)
    answer.parts(Delta(0, list(text), end(reason)))
    assert answer.choices[0].finish == finish


def test_chunks_of_parts_are_openais_deltas() -> None:
    chunks = ChatChunks(Reply("i", 1, "m", "fp", False, False), 1)
    parts: list[Part] = [Reasoning("r"), Text("t"), Call(0, "id", "f"), Arguments(0, "{}")]
    deltas = [decoded(chunk)["choices"][0]["delta"] for chunk in chunks.parts(0, parts)]
    assert deltas == [
        {"reasoning": "r", "reasoning_content": "r"},
        {"content": "t"},
        {"tool_calls": [{"index": 0, "id": "id", "type": "function",
                         "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
    ]  # fmt: skip


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    answer, stream, wire = make(prompts=2)
    stream.push(0, 97)
    stream.push_end(0, end("error"))
    stream.push_done(Done(0, "request_failed", "logits are not finite"))
    assert [delta.tokens for delta in await stream.take()] == [[97]]
    with pytest.raises(RequestFailed, match="logits are not finite"):
        await answer.collect()
    assert ("abort", 1) in wire.sent  # its sibling has no reader any more


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("more", [b"c", b"cd"])
async def test_what_was_drawn_past_a_stop_string_cannot_fail_an_answer(
    late: bool, more: bytes
) -> None:
    """A grammar and rules may leave no token there; all that is shown had been drawn before."""
    answer, stream, _ = make(["bc"])
    for token in b"ab" + more:
        stream.push(0, token)

    def fail() -> None:
        stream.push_end(0, end("error"))
        stream.push_done(Done(0, "invalid_request", "no token is allowed"))
        stream.news()

    if late:
        asyncio.get_running_loop().call_later(0.01, fail)
    else:
        fail()
    assert await answer.collect() == [[Text("a")]]
    assert (answer.finishes, answer.usage()["completion_tokens"]) == (["stop"], 3)
    assert stream.done


async def test_an_answer_that_is_not_whole_fails() -> None:
    answer, stream, wire = make(["bc"], n=2)
    for token in b"abc":
        stream.push(0, token)
    stream.push(1, 97)
    for choice in range(2):
        stream.push_end(choice, end("error"))
    for delta in await stream.take():
        answer.parts(delta)
    assert ("abort", 0) in wire.sent, "who fails before its end ends the others"
    stream.push_done(Done(0, "invalid_request", "no token is allowed"))
    with pytest.raises(ClientError, match="no token"):
        await answer.collect()


async def test_a_client_that_leaves_a_whole_answer_has_left() -> None:
    answer, stream, _ = make(["bc"])
    for token in b"abc":
        stream.push(0, token)
    for delta in await stream.take():
        answer.parts(delta)
    stream.fail(RequestFailed("gone"))
    with pytest.raises(RequestFailed, match="gone"):
        await answer.collect()


async def test_an_abort_nobody_asked_for_is_not_a_success() -> None:
    answer, stream, _ = make()
    stream.push_end(0, end("abort"))
    stream.push_done(Done(0))
    with pytest.raises(RequestFailed):
        await answer.collect()


async def test_a_stream_nobody_takes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.token_stream.BACKLOG_TOKENS", 10)
    _, stream, wire = make()
    for _ in range(11):
        stream.push(0, 97)
    assert wire.sent == [("abort", 0)]
    with pytest.raises(RequestFailed, match="too slow"):
        await stream.take()


def decoded(chunk: bytes) -> dict[str, Any]:
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n") == 2
    return cast(dict[str, Any], json.loads(chunk[6:]))


@pytest.mark.parametrize("kind", [ChatChunks, CompletionChunks])
@pytest.mark.parametrize("include_usage", [False, True])
def test_every_chunk_is_one_event_with_the_same_head(
    kind: type[Chunks], include_usage: bool
) -> None:
    reply = Reply("id-1", 123, 'mo"del', "fp", include_usage, False)
    chunks = kind(reply, 3)
    text = 'line\nbreak "quote" \\ \u2028 \x00 🐙'
    made = {
        "text": decoded(chunks.text(2, text)),
        "finish": decoded(chunks.finish(2, "stop", 'x"y')),
    }
    if kind.roles:
        made["role"] = decoded(chunks.role(2))
        assert made["role"]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert made["text"]["choices"][0]["delta"] == {"content": text}
        assert made["finish"]["choices"][0]["delta"] == {}
    else:
        assert made["text"]["choices"][0]["text"] == text
    for chunk in made.values():
        assert {key: chunk[key] for key in ("id", "object", "created", "model")} == {
            "id": "id-1",
            "object": kind.object,
            "created": 123,
            "model": 'mo"del',
        }
        assert ("usage" in chunk) == include_usage
        assert chunk.get("usage") is None
        assert len(chunk["choices"]) == 1
        assert chunk["choices"][0]["index"] == 2
    assert made["text"]["choices"][0]["finish_reason"] is None
    assert made["finish"]["choices"][0]["finish_reason"] == "stop"
    assert made["finish"]["choices"][0]["stop_reason"] == 'x"y'
    last = decoded(chunks.usage({"total_tokens": 3}))
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 3})


def test_usage_in_every_chunk() -> None:
    chunks = ChatChunks(Reply("i", 1, "m", "fp", True, True), 1)
    chunk = decoded(chunks.with_usage(chunks.text(0, "a"), {"completion_tokens": 1}))
    assert chunk["usage"] == {"completion_tokens": 1}

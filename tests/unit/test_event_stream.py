"""The writer of a stream: what it writes in the turn of the news is what its task would write."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.answer import Answer, Reply
from headrace.api.chat import ChatChunks
from headrace.api.exchange import Exchange
from headrace.api.metering import Meter
from headrace.api.prepare import Prepared, Shown
from headrace.api.service import Service
from headrace.api.stream import EventStream
from headrace.engine.client import EngineClient, Job
from headrace.engine.token_stream import Delta, TokenStream
from headrace.hooks.load import Hooks
from headrace.messages import Done, End, Sampling
from headrace.observe.metrics import ApiMetrics
from headrace.prices import Prices
from headrace.sources.files import ModelFiles
from headrace.text.parts import Parser, Part, Text
from headrace.text.tokenizer import load_tokenizer

FAKE = load_tokenizer(ModelFiles("fake", "fake", Path()))
SERVICE = cast(Service, SimpleNamespace(tokenizer=FAKE, eos_ids=[256, 258], hooks=Hooks()))
News = Sequence[tuple[int, bytes]]  # of one message: a choice and its tokens


class Line:
    """A connection as an `Exchange` knows it: its cycle, and the `send` beside that."""

    def __init__(self, *, direct: bool) -> None:
        self.written: list[tuple[str, bytes]] = []
        self.flow = SimpleNamespace(write_paused=False)
        self.chunked_encoding, self.disconnected, self.response_complete = True, False, False
        self.transport = SimpleNamespace(write=lambda data: self._note("at once", data))
        self.exchange = Exchange("req-1", self.send)
        if direct:
            self.exchange.cycle = cast(Any, self)

    def _note(self, how: str, framed: bytes) -> None:
        size, _, rest = framed.partition(b"\r\n")
        data = rest[: int(size, 16)]
        assert rest == data + b"\r\n", "one chunk"
        self.written.append((how, data))

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.written.append(("sent", message["body"]))

    @property
    def text(self) -> bytes:
        """All of it."""
        return b"".join(data for _, data in self.written)


class Shouting:
    """A parser: every letter is a part of its own; it has no word for "!"."""

    thinking = may_think = called = False

    def feed(self, text: str) -> list[Part]:
        if "!" in text:
            raise ValueError("no word for it")
        return [Text(char.upper()) for char in text]

    def flush(self) -> list[Part]:
        return []


async def serve(
    line: Line,
    news: Sequence[News],
    *,
    n: int = 1,
    stops: Sequence[str] = (),
    parser: Callable[[], Parser] | None = None,
    shown: Shown | None = None,
    continuous: bool = False,
    before: Callable[[int], None] = lambda _: None,
) -> TokenStream:
    """Hand over message after message, each when the writer waits for it, then the ends."""
    told: list[Any] = []
    wire = SimpleNamespace(send_abort=told.append, send_finish=lambda *what: told.append(what))
    stream = TokenStream(cast(EngineClient, wire), n, 0.0)
    stream.opened(1)
    jobs = [Job([1, 2, 3], 100, Sampling(), n=n)]
    prepared = Prepared(jobs, n, list(stops), True, False, [], shown or Shown(), parser=parser)
    answer = Answer(SERVICE, prepared, stream)
    metrics = ApiMetrics("m", CollectorRegistry())
    bill = Meter("m", Prices(), metrics.usage, "", 1.0).open(line.exchange, "", jobs, 3)
    reply = Reply("chatcmpl-1", 1, "m", "fp", continuous, continuous)
    chunks = ChatChunks(reply, n, None, shown)
    response = EventStream(answer, chunks, line.exchange, metrics, {}, bill)
    never = asyncio.Event()
    task = asyncio.create_task(response({}, cast(Any, never.wait), line.send))
    for number, message in enumerate(news):
        await idle(stream, task)
        before(number)
        for choice, tokens in message:
            for token in tokens:
                stream.push(choice, token)
        stream.news()
    await idle(stream, task)
    if not task.done():
        for choice in range(n):
            stream.push_end(choice, End(1, choice, "length"))
        stream.push_done(Done(1, prompt_tokens=3))
        stream.news()
    await task
    return stream


async def idle(stream: TokenStream, task: asyncio.Task[None]) -> None:
    """The writer waits for news, or has ended."""
    while not task.done() and (  # noqa: ASYNC110 - a turn of the loop: there is no event for it
        stream._waiter is None or stream._waiter.done()
    ):
        await asyncio.sleep(0)


def messages(seed: int, n: int) -> list[News]:
    """Letters, parts of characters, and now and then two tokens at once, from every choice."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices("abc de é🐙", k=40)).encode() for _ in range(n)]
    out: list[News] = []
    at = 0
    while at < max(map(len, texts)):
        step = draw.choice((1, 1, 1, 2))
        out.append([(i, text[at : at + step]) for i, text in enumerate(texts) if text[at:]])
        at += step
    return out


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"n": 3},
        {"stops": ["c d", "ab"]},
        {"parser": Shouting},
        {"shown": Shown(token_ids=True)},
        {"continuous": True},
    ],
    ids=str,
)
async def test_bytes_do_not_depend_on_who_writes_them(asked: dict[str, Any], seed: int) -> None:
    news = messages(seed, asked.get("n", 1))
    task, direct = Line(direct=False), Line(direct=True)
    await serve(task, news, **asked)
    await serve(direct, news, **asked)
    assert direct.text == task.text
    assert task.text.endswith(b"data: [DONE]\n\n")
    ways = [how for how, _ in direct.written]
    assert ways.count("at once") > len(ways) / 2, ways
    assert {how for how, _ in task.written} == {"sent"}


async def test_a_client_that_is_behind_is_waited_for_by_the_task() -> None:
    news, line, usual = messages(3, 1), Line(direct=True), Line(direct=False)
    await serve(usual, news)

    def before(number: int) -> None:
        line.flow.write_paused = number % 3 == 0

    await serve(line, news, before=before)
    assert line.text == usual.text
    assert {how for how, _ in line.written[3:-1]} == {"at once", "sent"}


@pytest.mark.parametrize("direct", [False, True])
async def test_what_breaks_in_the_writer_ends_the_stream_with_an_error(
    direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(direct=direct)
    stream = await serve(line, [[(0, b"a")], [(0, b"b")], [(0, b"!")]], parser=Shouting)
    *_, last = line.text.removesuffix(b"\n\n").split(b"\n\n")
    assert last.startswith(b'data: {"error":'), line.text
    assert b"no word" not in line.text, "what is not ours says nothing of its inside"
    assert "no word for it" in caplog.text
    assert stream.closed, "the engine was told"


async def test_news_wait_for_who_is_not_there() -> None:
    """A taker is asked only while `take` waits, and what it leaves comes by `take`."""
    given: list[list[int]] = []
    stream = TokenStream(cast(EngineClient, SimpleNamespace(send_abort=lambda _: None)), 1, 0.0)
    stream.opened(1)
    willing = True

    def taker(deltas: Iterable[Delta]) -> bool:
        given.extend(delta.tokens for delta in deltas)
        return willing

    stream.hand_to(taker)
    stream.push(0, 1)
    stream.news()
    assert not given, "nobody waited"
    assert [delta.tokens for delta in await stream.take()] == [[1]]
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.push(0, 2)
    stream.news()
    assert given == [[2]]
    assert not taking.done()
    willing = False
    stream.push(0, 3)
    stream.news()
    assert [delta.tokens for delta in await taking] == [[3]]
    assert given == [[2], [3]]
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    willing = True
    stream.push(0, 4)
    stream.push_done(Done(1))
    stream.news()
    assert [delta.tokens for delta in await taking] == [[4]], "the end is for `take`"
    assert stream.done

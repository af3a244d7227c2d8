"""The buffer of a resumable stream against a plain list, and what ends such a stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.event_buffer import EventBuffer
from headrace.api.resume import Live, split_event_id
from headrace.errors import InvalidRequest, NotFound

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4), st.integers(0, 60)),
        st.tuples(st.just("send"), st.integers(0, 6), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(STEPS, st.integers(50, 600))
def test_the_buffer_is_a_list_that_forgets(steps: list[tuple[str, int, int]], most: int) -> None:
    buffer, written, sent = EventBuffer("s", most), list[bytes](), 0
    for kind, count, size in steps:
        if kind == "write":
            events = [b"data: " + b"x" * size for _ in range(count)]
            buffer.write(b": comment\n\n" + b"".join(event + b"\n\n" for event in events))
            for event in events:
                written.append(b"id: s.%d\n%b\n\n" % (len(written) + 1, event))
        else:
            sent = max(sent, min(count, len(written)))
            buffer.mark_sent(sent)
        assert (buffer.last, buffer.sent) == (len(written), sent)
        for after in range(len(written) + 1):
            try:
                assert buffer.after(after) == b"".join(written[after:])
            except NotFound:
                kept = len(b"".join(written[after:]))
                assert after < sent, "what nobody was sent is there"
                assert kept > most - len(written[after]) or kept > most, "room for it was left"
        assert (
            buffer.size_bytes <= most or buffer.size_bytes <= len(b"".join(written[sent:])) + most
        )
        assert buffer.full == (len(b"".join(written[sent:])) > most // 2)
    with pytest.raises(InvalidRequest):
        buffer.after(len(written) + 1)


def event(live: Live, text: bytes, *, more: bool = True) -> asyncio.Task[None]:
    body = b"data: " + text + b"\n\n"
    message = {"type": "http.response.body", "body": body, "more_body": more}
    return asyncio.create_task(live.send(message))


async def begun(grace_s: float = 30.0, max_bytes: int = 4096) -> Live:
    live = Live("s", "/v1/chat/completions", grace_s, max_bytes)
    await live.send({"type": "http.response.start", "status": 200, "headers": []})
    return live


async def test_nobody_comes_back_in_time() -> None:
    live = await begun(grace_s=0.01)
    async with aclosing(live.follow(0)) as events:
        await event(live, b"a")
        assert b"data: a" in await anext(events)
    assert (await live.receive())["type"] == "http.disconnect"
    assert live.given_up


async def test_who_comes_back_in_time_stops_the_clock() -> None:
    live = await begun(grace_s=0.05)
    await event(live, b"a")
    async with aclosing(live.follow(0)) as events:
        await anext(events)
    async with aclosing(live.follow(1)) as events:
        coming = asyncio.ensure_future(anext(events))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(live.receive(), 0.2)
        await event(live, b"b", more=False)
        assert b"data: b" in await coming
        assert [data async for data in events] == []
    assert not live.given_up, "a stream that has ended needs nobody"


async def test_the_writer_waits_for_its_reader_and_for_nobody_else() -> None:
    live = await begun(max_bytes=4096)
    writing = [event(live, b"x" * 1500) for _ in range(3)]
    await asyncio.sleep(0)
    assert [task.done() for task in writing] == [True, False, False]
    async with aclosing(live.follow(0)) as events:
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))  # the first was taken
        await asyncio.gather(*writing)
        live.end()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_writer_that_waits_ends_with_its_stream() -> None:
    live = await begun(max_bytes=4096)
    writing = [event(live, b"x" * 4000), event(live, b"x" * 4000)]
    await asyncio.sleep(0)
    assert not all(task.done() for task in writing)
    live.give_up()
    await asyncio.gather(*writing)


async def test_a_stream_goes_on_where_it_began() -> None:
    live = await begun()
    await event(live, b"a")
    for route in ("", "/v1/chat/completions"):
        live.check(1, route)
    with pytest.raises(InvalidRequest, match="no event 2"):
        live.check(2, "")
    with pytest.raises(InvalidRequest) as caught:
        live.check(1, "/v1/messages")
    assert caught.value.param == "Last-Event-ID"
    for named in ("Last-Event-ID", "/v1/chat/completions", "/v1/messages", "/v1/streams/s"):
        assert named in caught.value.message


def test_event_ids() -> None:
    name = "3-" + "a" * 32
    assert split_event_id(f"{name}.7", None) == (name, 7)
    assert split_event_id(f"{name}.7", name) == (name, 7)
    assert split_event_id("7", name) == (name, 7)
    for given_id, stream in (("7", None), (f"{name}.7", "4-" + "a" * 32), ("", name), ("-1", name)):
        with pytest.raises(InvalidRequest):
            split_event_id(given_id, stream)

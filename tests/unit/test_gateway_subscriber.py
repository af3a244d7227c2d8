"""Subscriptions to real sockets: a publisher that restarts, addresses that are none."""

from __future__ import annotations

import asyncio
import tempfile

import pytest
import zmq

from headrace.engine.kv_events import KVEventPublisher
from headrace.gateway.block_index import BlockIndex
from headrace.gateway.event_feed import Feed
from headrace.gateway.subscriber import EventSource, Subscription
from headrace.kv import events
from headrace.kv.prefix import block_digest, root_digest
from tests.unit.gateway_rig import until
from tests.unit.kv_place import Place, held


def tell(made: KVEventPublisher, *ids: int) -> None:
    """A chain of blocks [n, n] is held."""
    digests, at = [], root_digest("", "")
    for n in ids:
        at = block_digest(at, [n, n])
        digests.append(at)
    made.put([events.Stored(events.Scope(), None, digests, [n for n in ids for _ in range(2)])])


async def tick(line: Subscription) -> None:
    """As the gateway does: an answer that got lost with its connection is asked for again."""
    while True:
        await asyncio.sleep(0.05)
        line.tick()


@pytest.mark.parametrize("encoding", ["array", "map"])
async def test_a_subscription_follows_a_publisher_through_its_restart(encoding: str) -> None:
    """Late, live, restarted while nobody looked: exact each time, and nothing old is claimed."""
    index = BlockIndex(2**20)
    index.add_worker("w")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        place = Place(folder)
        made = place.publisher(kv_events_encoding=encoding, kv_events_buffer_steps=2)
        for n in range(1, 6):
            tell(made, *range(1, n + 1))  # its first batches are gone by now
        loop = asyncio.get_running_loop()
        feed = Feed(index, "w", replays=True, now_s=loop.time())
        source = EventSource(endpoint=place.endpoint, replay_endpoint=place.replay_endpoint)
        line = Subscription(context, source, feed)
        ticking = asyncio.create_task(tick(line))
        try:
            await until(lambda: feed.state == "exact", "it has a snapshot")
            assert held(index, 1, 2, 3, 4, 5, 6) == 5
            tell(made, 7, 8)
            await until(lambda: held(index, 7, 8) == 2, "live batches arrive")
            made.stop()
            made = place.publisher(kv_events_encoding=encoding)
            tell(made, 9)  # as likely as not before the line is up again
            await until(lambda: held(index, 9) == 1, "the new one is heard")
            await until(lambda: feed.state == "exact", "and known")
            assert (held(index, 1), held(index, 7)) == (0, 0)
            assert feed.counts["restarts"] >= 1
        finally:
            ticking.cancel()
            line.close()
            made.stop()
            context.term()


async def test_addresses_that_are_none() -> None:
    """Of a subscription: refused at once. Of replays: they never come, and live batches do."""
    index = BlockIndex(2**20)
    index.add_worker("w")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        place = Place(folder)
        made = place.publisher()
        feed = Feed(index, "w", replays=True, now_s=0.0)
        with pytest.raises(zmq.ZMQError):
            Subscription(context, EventSource(endpoint="tcp://nowhere"), feed)
        source = EventSource(endpoint=place.endpoint, replay_endpoint="tcp://nowhere")
        line = Subscription(context, source, feed)
        try:
            line.tick()
            line.doubt()
            assert feed.state == "fallback"
        finally:
            line.close()
            made.stop()
            context.term()

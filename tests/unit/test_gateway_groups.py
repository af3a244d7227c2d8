"""Workers whose layers keep K and V in several ways: what their events say is what they hit."""

from __future__ import annotations

import random
import tempfile
import tracemalloc
from typing import Any, cast

import msgspec
import pytest

from headrace.engine.kv_events import KVEventPublisher
from headrace.engine.kv_wire import Wire
from headrace.gateway.beliefs import Beliefs
from headrace.gateway.block_index import ALSO_BYTES, BLOCK_BYTES, MAX_GROUPS, BlockIndex
from headrace.gateway.event_feed import Feed
from headrace.gateway.kv_wire import Other, Removed, Stored, decode_batch
from headrace.gateway.prefix_index import PrefixIndex, root_of, token_chain
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.subscriber import EventSource
from headrace.gateway.worker import Worker
from headrace.kv.events import EventLog, Scope
from headrace.kv.prefix import block_digest, root_digest
from tests.unit.engine_rig import Rig
from tests.unit.kv_place import Place
from tests.unit.kv_subscriber import PlainSubscriber

SIZE = 4


def new_index(max_bytes: int = 2**30) -> BlockIndex:
    index = BlockIndex(max_bytes)
    index.add_worker("w")
    return index


def hit(index: BlockIndex, tokens: list[int], size: int = SIZE) -> int:
    """Tokens of the prompt that the worker is thought to hold."""
    chain = token_chain(tokens, root_of(""), size)
    return index.match_with(chain, ["w"], lambda _: 0)[0] * size


class Line:
    """From an engine to a feed, with no socket between."""

    def __init__(self, windows: tuple[int, ...], encoding: Any) -> None:
        self.index = new_index()
        self.feed = Feed(self.index, "w", replays=False, now_s=0.0)
        self.counts: dict[str, int] = {}
        self._wire, self._next = Wire(encoding, SIZE, windows), 0

    def put(self, events: Any) -> None:
        payload = self._wire.encode(float(self._next), events)
        self.feed.live(self._next, payload, 0.0)
        self._next += 1

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("windows", [(0, 6), (0, 6, 6), (0, 0, 9), (0, 4, 13)])
@pytest.mark.parametrize("overlap", [False, True])
def test_predicted_hits_are_the_engines(windows: tuple[int, ...], overlap: bool) -> None:
    """Conversations and edited ones in a pool that holds a few: blocks of windows go first, so many
    a prefix is held by some layers and not by others."""
    line = Line(windows, "map" if overlap else "array")
    rig = Rig(
        blocks=28 * len(windows),
        block_size=SIZE,
        windows=windows,
        overlap=overlap,
        publisher=cast(KVEventPublisher, line),
    )
    chance = random.Random(7)
    prompts = [[chance.randrange(256) for _ in range(n)] for n in (30, 50, 66)]
    hits = shorter = 0
    for turn in range(200):
        old = chance.choice(prompts)
        prompt = [*old[: chance.randrange(len(old))], *(turn + i for i in range(9))][:90]
        prompts = [*prompts[-5:], prompt]
        cached, full = hit(line.index, prompt), _full(line.index, prompt)
        handle = rig.submit(prompt, chance.randrange(1, 12))
        rig.run()
        assert rig.dones[0, handle].cached_tokens == cached, f"turn {turn}"
        line.index.check()
        assert line.feed.state == "exact"
        hits += cached > 0
        shorter += cached < full
    assert hits > 20
    assert shorter > 3, "the first group alone would have said the same"
    rig.engine.close()


def _full(index: BlockIndex, prompt: list[int]) -> int:
    """What layers that keep all tokens hold."""
    return index.match(token_chain(prompt, root_of(""), SIZE), ["w"])[0] * SIZE


def test_who_comes_late_hears_of_all_groups() -> None:
    """The answer to who missed batches, in pieces, gives the index of who missed none."""
    scope, parent = Scope(), None
    at, digests = root_digest(*scope), []
    for i in range(700):
        at = block_digest(at, [i, i])
        digests.append(at)
    told, then = EventLog(), EventLog()
    for group in (0, 1):
        parent = None
        for i, digest in enumerate(digests):
            told.stored(scope, parent, digest, [i, i], group)
            parent = digest
    for i in (5, 6, 650):
        then.removed(digests[i], 1)
    then.removed(digests[300], 0)
    then.removed(digests[300], 1)
    then.stored(scope, digests[299], digests[300], [300, 300])
    index = new_index()
    index.promise("w", (0, 10))
    feed = Feed(index, "w", replays=True, now_s=0.0)
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        place = Place(folder)
        made = place.publisher((0, 10), kv_events_buffer_steps=1)
        for events in (told.take(), *([[]] * 5), then.take(), []):
            made.put(events)
        with PlainSubscriber(place.endpoint, place.replay_endpoint) as who:
            while not (batches := who.replay(0)) or batches[-1][0] != 7:
                pass
        made.stop()
    feed.asked(0.0)
    tokens = [i // 2 for i in range(1400)]
    wanted = {12: 10, 20: 10, 22: 10, 24: 24, 602: 600, 610: 600, 612: 612, 1310: 1300, 1400: 1400}
    for number, batch in batches:
        feed.reply(number, msgspec.msgpack.encode(batch), 0.0)
        assert all(hit(index, tokens[:end], 2) <= most for end, most in wanted.items())
    feed.reply_end(0.0)
    assert (feed.state, len(batches) > 1) == ("exact", True)
    index.check()
    assert {end: hit(index, tokens[:end], 2) for end in wanted} == wanted


def stored(hashes: list[int], group: int, window: int = 0, **more: Any) -> Stored:
    """Blocks [n, n] of hash n, behind the one before the first."""
    tokens = b"".join(n.to_bytes(4, "little") * 2 for n in hashes)
    parent = more.pop("parent", hashes[0] - 1 or None)
    return Stored([*hashes], parent, tokens, more.pop("size", 2), "", "", [], group, window)


def thought(index: BlockIndex, count: int) -> int:
    """Blocks that can be hit of a prompt [1, 1, 2, 2, ...]."""
    index.check()
    return hit(index, [n for n in range(1, count + 1) for _ in range(2)], 2) // 2


def test_groups_that_are_told_of_one_by_one() -> None:
    """As vLLM does it: groups of equal windows, several that keep all, in any order."""
    index = new_index()
    index.store("w", stored([1, 2, 3, 4], 3, 4))
    assert index.odd("w") == "all of its layers have a window"
    index.store("w", stored([1, 2, 3, 4], 1))
    assert (index.odd("w"), thought(index, 4)) == ("", 4)
    index.store("w", stored([1, 2, 3], 0, 4))
    assert thought(index, 4) == 3, "both groups with that window are needed"
    index.store("w", stored([1, 2], 2))
    assert thought(index, 4) == 2, "all groups without one are needed"
    index.store("w", stored([3, 4], 2))
    index.store("w", stored([4], 0, 4))
    assert thought(index, 4) == 4
    index.remove("w", [1, 2], 3)
    index.remove("w", [1, 9], 0)
    assert thought(index, 4) == 4, "the window before the end is there"
    assert thought(index, 3) == 0
    index.remove("w", [1], 1)
    assert (thought(index, 4), index.blocks("w")) == (0, 3)
    index.store("w", stored([1], 1))
    assert thought(index, 4) == 4
    index.remove("w", [4])
    assert thought(index, 4) == 0, "3 wants 2, which a window does not hold"
    index.store("w", stored([2], 3, 4))
    assert thought(index, 4) == 3, "4 is in no group"
    index.clear("w")
    index.store("w", stored([1, 2], 0))
    assert thought(index, 2) == 2, "a new run of the worker may have other groups"


def test_what_is_expected_counts_in_all_groups() -> None:
    """Of a prompt that is on its way no group has told anything yet."""
    index = new_index()
    for group, window in ((0, 0), (1, 4)):
        index.store("w", stored([1, 2], group, window))
    chain = token_chain([n for n in range(1, 6) for _ in range(2)], root_of(""), 2)
    coming = dict.fromkeys(chain[2:4], index._bits["w"])
    assert index.match_with(chain, ["w"], lambda chunk: coming.get(chunk, 0)) == (4,)


def test_what_was_promised_is_waited_for() -> None:
    index = new_index()
    index.promise("w", (0, 4))
    index.store("w", stored([1, 2], 0))
    assert (thought(index, 2), index.odd("w")) == (0, "")
    index.store("w", stored([1, 2], 1, 4))
    assert thought(index, 2) == 2
    index.clear("w")
    index.store("w", stored([1, 2], 0))
    assert thought(index, 2) == 0, "also after a restart"
    index.promise("w", (7,))
    assert index.odd("w") == "all of its layers have a window"


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([stored([1], 0), stored([1], 1, 4, size=4)], "blocks of several sizes"),
        ([stored([1], 0), stored([1], 1, 4), stored([2], 1, 6)], "the window of its KV group 1"),
        ([stored([1], 0), stored([2], 0, 6)], "the window of its KV group 0"),
        ([stored([1], n, n and 4) for n in range(MAX_GROUPS + 1)], "more than 64 KV groups"),
    ],
)
def test_groups_of_which_nothing_can_be_said(events: list[Stored], why: str) -> None:
    index = new_index()
    for event in events:
        index.store("w", event)
    index.store("w", stored([3], 70, 4))  # a group that comes later
    index.remove("w", [3])
    index.check()
    feed = Feed(index, "w", replays=False, now_s=0.0)
    assert (feed.state, why in feed.why) == ("fallback", True), feed.why
    index.clear("w")
    index.store("w", stored([1], 0))
    assert index.odd("w") == ""


def test_memory_of_more_groups_is_within_the_budget() -> None:
    count = 3000
    most = count * (BLOCK_BYTES + 2 * ALSO_BYTES)
    index = new_index(most)
    tracemalloc.start()
    try:
        for group, window in ((0, 0), (1, 512), (2, 4096)):
            for i in range(count):
                tokens = b"".join((i * 16 + j).to_bytes(4, "little") for j in range(16))
                assert index.store(
                    "w", Stored([2**63 + i], None, tokens, 16, "", "", [], group, window)
                )
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used <= index.used_bytes == most
    assert not index.store("w", stored([5], 1, 512, size=16))
    index.check()


def read(*fields: Any) -> list[Any]:
    return decode_batch(msgspec.msgpack.encode([1.0, [["BlockStored", *fields]], 0]))[1]


def test_groups_on_the_wire() -> None:
    block = ([7], None, [1, 2], 2, None, "GPU", None, None)
    (one,) = read(*block, 3, "sliding_window", 512)
    assert (one.group, one.window) == (3, 512)
    (one,) = read(*block, 1, "full_attention", 512)
    assert (one.group, one.window) == (1, 0), "a window that is computed, not kept by"
    (one,) = read(*block)
    assert (one.group, one.window) == (0, 0)
    (one,) = read(*block, 0)
    assert (one.group, one.window) == (0, 0)
    assert read(*block, 1) == [Other("None")], "nobody knows what its blocks are good for"
    assert read(*block, 1, "sliding_window") == [Other("sliding_window without a window")]
    assert read(*block, 1, "sliding_window", 0) == [Other("sliding_window without a window")]
    assert read(*block, 1, "mamba", None) == [Other("mamba")]
    gone = msgspec.msgpack.encode([1.0, [["BlockRemoved", [7], "GPU", 2]], 0])
    assert decode_batch(gone)[1] == [Removed([7], 2)]


@pytest.mark.parametrize(
    ("card", "why"),
    [
        ({"endpoint": "nowhere"}, "no KV events from nowhere"),
        ({"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "nowhere"}, "no replay of KV events"),
    ],
)
async def test_an_address_that_is_none_is_logged_once(
    card: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(WorkerSpec(url="http://w", models=("m",)), GatewaySettings())
    worker.cards["m"] = {"kv_events": card}
    beliefs = Beliefs(GatewaySettings(), PrefixIndex(2**20))
    beliefs.add_worker(worker.name)
    for _ in range(3):
        beliefs.follow(worker)
        beliefs.came_up(worker)
    assert caplog.text.count(why) == 1
    assert beliefs.state(worker.name) == "fallback"
    worker.cards["m"] = {"kv_events": card | {"topic": "another"}}
    beliefs.follow(worker)
    assert caplog.text.count(why) == 2
    beliefs.remove_worker(worker.name)
    beliefs.close()


async def test_a_card_says_which_groups_there_are() -> None:
    worker = Worker(WorkerSpec(url="http://w", models=("m",)), GatewaySettings())
    place = {"endpoint": "tcp://127.0.0.1:1", "windows": [0, 512]}
    worker.cards["m"] = {"kv_events": place}
    beliefs = Beliefs(GatewaySettings(), PrefixIndex(2**20))
    beliefs.add_worker(worker.name)
    beliefs.follow(worker)
    wanted = EventSource(endpoint="tcp://127.0.0.1:1", windows=(0, 512))
    assert beliefs._followed[worker.name].source == wanted
    worker.cards["m"] = {"kv_events": place | {"windows": [512]}}
    beliefs.follow(worker)
    assert beliefs.blocks.odd(worker.name) == "all of its layers have a window"
    beliefs.remove_worker(worker.name)
    beliefs.close()

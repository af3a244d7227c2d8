"""KV events of an engine: their format, their numbers, and what who missed some gets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from headrace.config import Settings
from headrace.engine.kv_events import KVEventPublisher
from headrace.engine.kv_wire import Wire, hash_of
from headrace.errors import ConfigError
from headrace.kv.events import Cleared, EventLog, KVEvent, Removed, Scope, Stored
from headrace.kv.prefix import block_digest, root_digest
from tests.unit.engine_rig import Rig
from tests.unit.kv_subscriber import PlainSubscriber


# As vLLM 0.11 declares them: arrays that begin with the name of the class.
class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(ArrayEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None


class BlockRemoved(ArrayEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(ArrayEvent):
    pass


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


NO_SCOPE = Scope()


def chain(tokens: list[int], size: int, scope: Scope = NO_SCOPE) -> list[bytes]:
    out, at = [], root_digest(*scope)
    for start in range(0, len(tokens), size):
        at = block_digest(at, tokens[start : start + size])
        out.append(at)
    return out


@pytest.fixture
def places() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        yield {
            "kv_events_endpoint": f"ipc://{Path(folder) / 'pub'}",
            "kv_events_replay_endpoint": f"ipc://{Path(folder) / 'replay'}",
        }


def publisher(places: dict[str, Any], **more: Any) -> KVEventPublisher:
    return KVEventPublisher(Settings(**places, **more), block_size=2)


def test_vllms_own_classes_read_the_array_form() -> None:
    digests = chain([1, 2, 3, 4], 2, Scope("lora", "salt"))
    events: list[KVEvent] = [
        Stored(Scope("lora", "salt"), None, digests, [1, 2, 3, 4]),
        Removed(digests[1:]),
        Cleared(),
    ]
    batch = msgspec.msgpack.decode(Wire("array", 2).encode(5.0, events), type=ArrayBatch)
    stored, removed, cleared = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [hash_of(digest) for digest in digests]
    assert (stored.parent_block_hash, stored.token_ids, stored.block_size) == (
        None,
        [1, 2, 3, 4],
        2,
    )
    assert (stored.medium, stored.lora_name, stored.lora_id) == ("GPU", "lora", None)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [hash_of(digests[1])]
    assert isinstance(cleared, AllBlocksCleared)
    assert (batch.ts, batch.data_parallel_rank) == (5.0, 0)


def test_the_map_form_and_the_extra_keys() -> None:
    scope = Scope("lora", "salt", "long")
    digests = chain([1, 2, 3, 4], 2, scope)
    wire = Wire("map", 2, (7,))
    one = msgspec.msgpack.decode(wire.encode(5.0, [Stored(scope, None, digests, [1, 2, 3, 4])]))
    (stored,) = one["events"]
    assert stored["type"] == "BlockStored"
    assert stored["extra_keys"] == [["lora", "salt", ["variant", "long"]], ["lora"]]
    assert (stored["kv_cache_spec_kind"], stored["kv_cache_spec_sliding_window"]) == (
        "sliding_window",
        7,
    )
    later = Stored(Scope("", "salt"), digests[0], digests[1:], [3, 4])
    (stored,) = msgspec.msgpack.decode(wire.encode(5.0, [later]))["events"]
    assert stored["parent_block_hash"] == hash_of(digests[0])
    assert stored["extra_keys"] is None, "the salt is in the first block of a sequence alone"


def test_events_of_groups_are_about_one_each() -> None:
    """Seven groups in memory, of two kinds of layers: two that events tell of."""
    kinds = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
    told = EventLog()
    digests = chain([1, 2, 3, 4, 5, 6], 2)
    for group in (0, 1):
        for i, digest in enumerate(digests):
            parent = digests[i - 1] if i else None
            told.stored(NO_SCOPE, parent, digest, [2 * i + 1, 2 * i + 2], group)
    for digest in digests[:2]:
        told.removed(digest, 1)
        told.removed(digest)
    batch = Wire("map", 2, (0, *[512] * 6)).encode(5.0, told.take())
    full, near, *gone = msgspec.msgpack.decode(batch)["events"]
    assert [full[key] for key in kinds] == [0, "full_attention", None]
    assert [near[key] for key in kinds] == [1, "sliding_window", 512]
    hashes = [hash_of(digest) for digest in digests]
    assert full["block_hashes"] == near["block_hashes"] == hashes
    assert full["token_ids"] == near["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert [one["type"] for one in gone] == ["BlockRemoved"] * 2
    assert [(one["group_idx"], one["block_hashes"]) for one in gone] == [
        (1, hashes[:2]),
        (0, hashes[:2]),
    ]


def test_blocks_of_groups_that_come_in_turns_stay_apart() -> None:
    """A block follows the one before it in its own group alone."""
    told, (first, then) = EventLog(), chain([1, 2, 3, 4], 2)
    for group in (0, 1):
        told.stored(NO_SCOPE, None, first, [1, 2], group)
    told.stored(NO_SCOPE, first, then, [3, 4])
    facts = [(one.group, one.digests) for one in told.take() if isinstance(one, Stored)]
    assert facts == [(0, [first]), (1, [first]), (0, [then])]


@pytest.mark.parametrize("encoding", ["array", "map"])
def test_an_engine_tells_what_its_cache_holds(
    encoding: Literal["array", "map"], places: dict[str, Any]
) -> None:
    made = KVEventPublisher(Settings(**places, kv_events_encoding=encoding), block_size=4)
    made.start()
    rig = Rig(blocks=8, block_size=4, publisher=made)
    try:
        with PlainSubscriber(*places.values()) as who:
            rig.submit([7] * 9, max_tokens=4)
            rig.run()
            rig.submit([8] * 21, max_tokens=4)  # takes blocks of the first one
            rig.run()
            said = who.replay(0)
            assert [number for number, _ in said] == list(range(len(said)))
            held: dict[int, list[int]] = {}
            for _, batch in said:
                for event in batch["events"] if encoding == "map" else batch[1]:
                    fields = list(event.values()) if isinstance(event, dict) else event
                    if fields[0] == "BlockStored":
                        held |= dict(zip(fields[1], _cut(fields[3], 4), strict=True))
                    elif fields[0] == "BlockRemoved":
                        for digest in fields[1]:
                            del held[digest]
            digests = [hash_of(d) for d in chain([8] * 20, 4)]
            assert [held[digest] for digest in digests] == [[8] * 4] * 5
            assert len(held) == len(rig.kv._index)
            assert rig.engine.stats().kv_events["published"] == len(said)
    finally:
        rig.engine.close()
    assert not made.is_alive()


def _cut(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def test_topic_and_numbers_of_the_subscription(places: dict[str, Any]) -> None:
    made = publisher(places, kv_events_topic="kv@me")
    made.start()
    try:
        with PlainSubscriber(places["kv_events_endpoint"], topic=b"kv@") as who:
            while not who.sub.poll(20):  # until the subscription is there
                made.put([Cleared()])
            _, first, _ = who.next()
            made.put([Removed([b"x" * 16])])
            topic, number, batch = who.next()
            while batch[1] == [["AllBlocksCleared"]]:
                topic, number, batch = who.next()
            assert topic == b"kv@me"
            assert number > first
            assert batch[1] == [["BlockRemoved", [hash_of(b"x" * 16)], "GPU", 0]]
    finally:
        made.stop()


def test_who_comes_late_gets_what_is_held_now(places: dict[str, Any]) -> None:
    made = publisher(places, kv_events_buffer_steps=3)
    made.start()
    tokens = list(range(20))
    digests = chain(tokens, 2)
    try:
        for i, digest in enumerate(digests):
            parent = digests[i - 1] if i else None
            made.put([Stored(Scope(), parent, [digest], tokens[2 * i : 2 * i + 2])])
        made.put([Removed([digests[9]])])
        with PlainSubscriber(*places.values()) as who:
            said = who.replay(0)
            assert [number for number, _ in said] == [10]
            (batch,) = (batch for _, batch in said)
            assert batch[1][0] == ["AllBlocksCleared"]
            (stored,) = batch[1][1:]
            assert stored[1] == [hash_of(digest) for digest in digests[:9]]
            assert stored[3] == tokens[:18]
            kept = who.replay(9)
            assert [number for number, _ in kept] == [9, 10]
            assert kept[-1][1][0] == batch[0], "known again by its time"
            assert who.replay(11) == []
        assert (made.counts["replays"], made.counts["snapshots"]) == (3, 1)
    finally:
        made.stop()


def test_a_full_queue_drops_and_the_numbers_say_so(places: dict[str, Any]) -> None:
    made = publisher(places, kv_events_max_queue_size=2)
    for i in range(5):
        made.put([Stored(Scope(), None, [bytes([i]) * 16], [1, 2])])
    assert made.counts["dropped"] == 3
    made.start()
    try:
        with PlainSubscriber(*places.values()) as who:
            assert [number for number, _ in who.replay(0)] == [0, 1]
            made.put([Removed([b"x"])])
            assert [number for number, _ in who.replay(0)] == [0, 1, 5]
            assert made.counts["snapshots"] == 0, "nobody knows what is held"
    finally:
        made.stop()


def test_addresses_that_cannot_be_had(places: dict[str, Any]) -> None:
    made = publisher(places)
    try:
        with pytest.raises(ConfigError, match="kv_events_endpoint = 'ipc:///no/such"):
            publisher({"kv_events_endpoint": "ipc:///no/such/folder/x"})
        replay = {"kv_events_replay_endpoint": "ipc:///no/such/folder/x"}
        with pytest.raises(ConfigError, match="kv_events_replay_endpoint"):
            publisher({**places, **replay, "kv_events_endpoint": "tcp://*:0"})
    finally:
        made.start()
        made.stop()

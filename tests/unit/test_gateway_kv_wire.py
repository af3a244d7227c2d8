"""What the gateway reads of workers' KV events: encodings, and what is none."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from headrace.gateway.block_index import BlockIndex
from headrace.gateway.kv_wire import Cleared, NoBatch, Other, Removed, Stored, decode_batch
from headrace.gateway.prefix_index import root_of, token_chain


# vLLM's classes, old (arrays that begin with a tag) and new (maps with the tag under "type").
class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class MapBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class ArrayStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class MapStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    something_new: int = 0


class ArrayRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class MapRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class MapCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Unheard(msgspec.Struct, tag="SomethingElse"):
    x: int = 1


encode = msgspec.msgpack.encode


@pytest.mark.parametrize("batch", [ArrayBatch, MapBatch])
@pytest.mark.parametrize("maps", [False, True])
def test_all_four_encodings(batch: Any, maps: bool) -> None:
    hashes: Any = [7, b"\xff\x00"]
    tokens = [1, 2, 3, 4]
    stored = (MapStored if maps else ArrayStored)(hashes, 5, tokens, 2, None, "GPU", None)
    removed = (MapRemoved if maps else ArrayRemoved)([7], "GPU")
    cleared = MapCleared() if maps else ArrayCleared()
    made, events = decode_batch(encode(batch(1.5, [stored, Unheard(), removed, cleared], 0)))
    assert made == 1.5
    packed = b"".join(n.to_bytes(4, "little") for n in tokens)
    assert events == [Stored(hashes, 5, packed, 2, "", "", []), Removed([7]), Cleared()]


def stored(*fields: Any, **more: Any) -> Any:
    one = {"lora_id": None, "medium": "GPU", "lora_name": None, **more}
    return decode_batch(encode(MapBatch(1.0, [MapStored(*fields, **one)])))[1]


def test_what_is_in_a_hash_beside_tokens() -> None:
    """Adapter and salt choose the chain; anything else makes a block that no text meets."""
    two = ([1, 2], None, [1, 2, 3, 4], 2)
    keys = [["lora", "salt"], ["lora"]]
    (one,) = stored(*two, lora_name="lora", extra_keys=keys)
    assert (one.adapter, one.salt, one.extra) == ("lora", "salt", [])
    (one,) = stored(*two, extra_keys=[["salt"], None])
    assert (one.adapter, one.salt, one.extra) == ("", "salt", [])
    (one,) = stored(*two, extra_keys=[None, ["picture"]])
    assert (one.salt, one.extra) == ("", ["", "['picture']"])
    (one,) = stored(*two, extra_keys=[["salt", ["variant", "long"]], None])
    assert (one.salt, one.extra[0]) == ("", "['salt', ['variant', 'long']]")
    index = BlockIndex(2**20)
    index.add_worker("w")
    for event in stored(*two, extra_keys=[None, ["picture"]]):
        assert index.store("w", event)
    assert index.match(token_chain([1, 2, 3, 4], root_of(""), 2), ["w"]) == (1,)


def test_lists_within_lists_without_an_end_are_no_batch() -> None:
    for payload in (b"\x92\x01" + b"\x91" * 10**5, b"\x81\xa1a" * 10**5):
        with pytest.raises(NoBatch, match="RecursionError"):
            decode_batch(payload)
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1}
    for depth in range(700, 1000):  # where they end near what can be read
        keys = msgspec.Raw(b"\x91" * depth + b"\x01")
        payload = msgspec.msgpack.encode({"ts": 1, "events": [{**event, "extra_keys": keys}]})
        index = BlockIndex(2**20)
        index.add_worker("w")
        with contextlib.suppress(NoBatch):
            (one,) = decode_batch(payload)[1]
            assert isinstance(one, Stored)
            assert index.store("w", one)


def test_events_that_nobody_can_place_are_passed_over() -> None:
    two = ([1, 2], None, [1, 2, 3, 4], 2)
    assert stored(*two, medium="CPU") == []
    assert stored(*two, lora_id=3) == []
    assert stored([1], None, [], 2) == []
    assert stored([1], None, [1, 2, 3], 2) == []
    assert stored(*two, kv_cache_spec_kind="mamba") == [Other("mamba")]
    assert stored(*two, kv_cache_spec_kind="full_attention") != []
    assert decode_batch(encode(MapBatch(1.0, [MapRemoved([1], "CPU")])))[1] == []


@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_none(data: bytes) -> None:
    with contextlib.suppress(NoBatch):
        decode_batch(data)


@pytest.mark.parametrize(
    "batch",
    [
        5, {"ts": 1}, [1.0], [1.0, [5]], [1.0, [["BlockStored"]]], [1.0, [{"no": "type"}]],
        [1.0, [["BlockRemoved", 5]]], [1.0, [["BlockRemoved", [None]]]],
        [1.0, [["BlockStored", [1], None, [-1], 1]]], [1.0, [["BlockStored", [1], None, ["x"], 1]]],
        [1.0, [["BlockStored", [1], 1.5, [1], 1]]], [1.0, [["BlockStored", [1], None, [2**40], 1]]],
    ],
)  # fmt: skip
def test_what_is_no_batch(batch: Any) -> None:
    with pytest.raises(NoBatch):
        decode_batch(encode(batch))

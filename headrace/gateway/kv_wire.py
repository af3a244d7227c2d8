"""KV events of engines, read: vLLM's format and those that follow it.

Batches and events are arrays or maps, in any mixture; maps are read by name, arrays by position,
and what is not known is passed over. See `engine/kv_wire.py` for the fields.

Engines whose layers keep K and V in several ways tell of each way as a group of its own. Two ways
are read: all tokens, and those of a window. Of a group whose kind is not told the first is thought
to keep all.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

Hash = int | bytes | str
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
# Of caches in which a prefix is held block by block from its beginning.
_PLAIN = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
# Of those of which the newest tokens before a prefix's end are enough.
_WINDOW = frozenset({"sliding_window", "sliding_window_mla"})
_DEVICE = frozenset({None, "GPU", "gpu"})  # memory that needs no copy before it is used
# What reading bytes of another form raises; RecursionError: lists within lists without an end.
_WRONG = (
    msgspec.DecodeError, LookupError, TypeError, ValueError, OverflowError, RecursionError,
)  # fmt: skip


class Stored(NamedTuple):
    """Blocks that follow one another are held."""

    hashes: list[Hash]
    parent: Hash | None  # the block before the first; None: a sequence begins with them
    tokens: bytes  # ids of all of them, unsigned 32-bit integers
    block_size: int
    adapter: str
    salt: str
    extra: list[str]  # by block; what else is in its hash, "" = nothing; [] = none has any
    group: int = 0
    window: int = 0  # of the group, in tokens; 0 = it keeps all


class Removed(NamedTuple):
    """These blocks are held no more."""

    hashes: list[Hash]
    group: int | None = None  # None: in no group


class Cleared(NamedTuple):
    """Nothing is held any more."""


class Other(NamedTuple):
    """An event of a cache whose blocks are no prefix by themselves."""

    kind: str


Event = Stored | Removed | Cleared | Other


class NoBatch(ValueError):
    """These bytes are no batch of events."""


def decode_batch(payload: bytes) -> tuple[object, list[Event]]:
    """When it was made, in the worker's own words, and the events in order. Raises NoBatch.

    Events of unknown names are left out, and so are those of other memories and of blocks whose
    tokens are not told: nobody can place them.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
        made, raw = (batch["ts"], batch["events"]) if isinstance(batch, dict) else batch[:2]
        return made, [event for item in raw if (event := _event(item)) is not None]
    except _WRONG as error:
        raise NoBatch(f"{type(error).__name__}: {error}") from None


def _event(item: Any) -> Event | None:
    name = item["type"] if isinstance(item, dict) else item[0]
    if name == "AllBlocksCleared":
        return Cleared()
    if name == "BlockRemoved":
        fields = _named(item, _REMOVED)
        hashes, group = _hashes(fields["block_hashes"]), _group(fields)
        return Removed(hashes, group) if fields.get("medium") in _DEVICE else None
    return _stored(_named(item, _STORED)) if name == "BlockStored" else None


def _named(item: Any, names: Sequence[str]) -> dict[str, Any]:
    return item if isinstance(item, dict) else dict(zip(names, item[1:], strict=False))


def _group(fields: dict[str, Any]) -> int | None:
    group = fields.get("group_idx")
    if group is not None and not isinstance(group, int):
        raise ValueError("group_idx is no number")
    return group


def _hashes(value: Any) -> list[Hash]:
    if not isinstance(value, list) or not all(isinstance(h, int | bytes | str) for h in value):
        raise ValueError("block_hashes is not a list of hashes")
    return value


def _stored(fields: dict[str, Any]) -> Event | None:
    group, kind = _group(fields) or 0, fields.get("kv_cache_spec_kind")
    window = fields.get("kv_cache_spec_sliding_window") if kind in _WINDOW else 0
    if not isinstance(window, int) or (kind in _WINDOW and window < 1):
        return Other(f"{kind} without a window")
    if kind not in _PLAIN and kind not in _WINDOW and (kind is not None or group):
        return Other(str(kind))
    hashes, parent = _hashes(fields["block_hashes"]), fields.get("parent_block_hash")
    tokens, size = fields.get("token_ids"), fields["block_size"]
    if fields.get("medium") not in _DEVICE or not isinstance(tokens, list):
        return None
    if not isinstance(size, int) or size < 1 or len(tokens) != size * len(hashes) or not hashes:
        return None
    if parent is not None and not isinstance(parent, int | bytes | str):
        raise ValueError("parent_block_hash is no hash")
    adapter = fields.get("lora_name")
    adapter = adapter if isinstance(adapter, str) else ""
    if not adapter and fields.get("lora_id") is not None:
        return None  # of an adapter whose name is not told
    salt, extra = _extra(fields.get("extra_keys"), adapter, len(hashes), first=parent is None)
    packed = array("I", tokens).tobytes()
    return Stored(hashes, parent, packed, size, adapter, salt, extra, group, window)


def _extra(keys: Any, adapter: str, blocks: int, *, first: bool) -> tuple[str, list[str]]:
    """The cache salt, and what else each block's hash has beside tokens and adapter, as text.

    A single text in the first block of a sequence is the salt.
    """
    if not isinstance(keys, list) or len(keys) != blocks:
        return "", []
    rest = [[k for k in key or () if not (adapter and k == adapter)] for key in keys]
    salt = ""
    if first and len(rest[0]) == 1 and isinstance(rest[0][0], str):
        salt, rest[0] = rest[0][0], []
    return salt, [repr(keys) if keys else "" for keys in rest] if any(rest) else []

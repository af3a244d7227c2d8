"""KV events as vLLM writes them: a batch of events in msgpack.

    batch         [ts, events, data_parallel_rank]
    BlockStored   block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
                  lora_name, extra_keys, group_idx, kv_cache_spec_kind,
                  kv_cache_spec_sliding_window
    BlockRemoved  block_hashes, medium, group_idx
    AllBlocksCleared

As arrays, an event begins with its name; as maps, the name is under "type". A block's hash is the
low 64 bits of its chain digest. `medium` is "GPU" for the memory that the engine computes in, on a
processor too: others would read "CPU" as a slower tier. `extra_keys` holds a list for each block:
the adapter's name, and in the first block of a sequence the cache salt.

A model whose layers have several windows, or some none, has several groups (`kv.events`): each
event is of one, with `kv_cache_spec_kind` "sliding_window" and the window in tokens, or
"full_attention". A block has one hash in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from headrace.kv.events import KVEvent, Removed, Scope, Stored, groups_of

MEDIUM = "GPU"
STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
REMOVED = ("block_hashes", "medium", "group_idx")
BATCH = ("ts", "events", "data_parallel_rank")


def hash_of(digest: bytes) -> int:
    """A block's hash on the wire."""
    return int.from_bytes(digest[-8:], "big")


class Wire:
    """Encodes batches for one engine. windows: of its KV groups, in tokens; 0 = none."""

    def __init__(
        self, encoding: Literal["array", "map"], block_size: int, windows: Sequence[int] = (0,)
    ) -> None:
        self._maps = encoding == "map"
        self._block_size = block_size
        self._groups: list[list[Any]] = [
            [group, "sliding_window" if window else "full_attention", window or None]
            for group, window in enumerate(groups_of(windows))
        ]
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, ts: float, events: Sequence[KVEvent]) -> bytes:
        """One batch. ts: seconds since the epoch."""
        return self._encode(self._shaped("", BATCH, [ts, [self._event(e) for e in events], 0]))

    def _shaped(self, name: str, fields: Sequence[str], values: list[Any]) -> Any:
        if not self._maps:
            return [name, *values] if name else values
        named = dict(zip(fields, values, strict=True))
        return {"type": name, **named} if name else named

    def _event(self, event: KVEvent) -> Any:
        if isinstance(event, Stored):
            return self._stored(event)
        if isinstance(event, Removed):
            hashes = [hash_of(digest) for digest in event.digests]
            return self._shaped("BlockRemoved", REMOVED, [hashes, MEDIUM, event.group])
        return self._shaped("AllBlocksCleared", (), [])

    def _stored(self, event: Stored) -> Any:
        hashes = [hash_of(digest) for digest in event.digests]
        parent = None if event.parent is None else hash_of(event.parent)
        keys = extra_keys(event.scope, len(hashes), first=parent is None)
        lora = event.scope.adapter or None
        values = [hashes, parent, event.tokens, self._block_size, None, MEDIUM, lora, keys]
        return self._shaped("BlockStored", STORED, values + self._groups[event.group])


def extra_keys(scope: Scope, blocks: int, *, first: bool) -> list[list[Any] | None] | None:
    """What beside its tokens is in the hash of each block; None: nothing.

    first: the first of them begins a sequence. A variant is a list of its own, so that nobody
    takes it for a salt.
    """
    each = [scope.adapter] if scope.adapter else []
    begins: list[Any] = [*each, *([scope.salt] if scope.salt else [])]
    begins += [["variant", scope.variant]] if scope.variant else []
    if not begins or not (each or first):
        return None
    return [begins if first and not i else (list(each) or None) for i in range(blocks)]

"""Where KV events are published, and what an index holds of blocks [n, n] that were told."""

from __future__ import annotations

from typing import Any

from headrace.config import Settings
from headrace.engine.kv_events import KVEventPublisher
from headrace.gateway.block_index import BlockIndex
from headrace.gateway.prefix_index import root_of, token_chain


class Place:
    """Where a publisher of this process listens; `publisher()` starts one, again and again."""

    def __init__(self, folder: str) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/pub", f"ipc://{folder}/replay"

    def publisher(self, windows: tuple[int, ...] = (0,), **more: Any) -> KVEventPublisher:
        made = KVEventPublisher(
            Settings(
                kv_events_endpoint=self.endpoint,
                kv_events_replay_endpoint=self.replay_endpoint,
                **more,
            ),
            block_size=2,
            windows=windows,
        )
        made.start()
        return made


def held(index: BlockIndex, *ids: int) -> int:
    chain = token_chain([i for i in ids for _ in range(2)], root_of(""), 2)
    return index.match(chain, ["w"])[0]

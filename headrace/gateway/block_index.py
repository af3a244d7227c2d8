"""Which worker holds which blocks, as its own events say.

A worker's hashes mean nothing here: they only link its events. Where a block stands follows from
the token ids on the way to it, so workers with other hashes, and requests that nobody hashed but
us, meet in the same chain of integers (see `prefix_index.token_chain`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.gateway.kv_wire import Hash, Stored
from headrace.gateway.prefix_index import Holders, root_of

BLOCK_BYTES = 512  # of one block at one worker without its tokens, upper bound; tests measure it


class _Orphan(NamedTuple):
    """A block that is held while the one before it is not: nothing can hit it until it is."""

    parent: Hash
    key: tuple[bytes, str]


class _Worker:
    def __init__(self) -> None:
        self.chains: dict[Hash, int] = {}  # of the blocks that are held and placed
        self.orphans: dict[Hash, _Orphan] = {}
        self.waiting: dict[Hash, list[Hash]] = {}  # a block that is not held -> orphans behind it
        self.used_bytes = 0
        self.block_size = 0  # tokens; 0 = nothing was stored yet


class BlockIndex(Holders):
    """Blocks by worker, within one budget of bytes. What does not fit is not held here."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._workers: dict[str, _Worker] = {}
        self.used_bytes = 0

    def add_worker(self, name: str) -> None:
        """From now on `name` may hold blocks."""
        self._enter(name)
        self._workers[name] = _Worker()

    def remove_worker(self, name: str) -> None:
        """`name` is gone."""
        self.clear(name)
        del self._workers[name]
        self._leave(name)

    def block_size(self, name: str) -> int:
        """Tokens of a block of `name`; 0 = not known."""
        return self._workers[name].block_size

    def blocks(self, name: str) -> int:
        """How many blocks `name` is known to hold."""
        worker = self._workers[name]
        return len(worker.chains) + len(worker.orphans)

    def clear(self, name: str) -> None:
        """`name` holds nothing."""
        worker = self._workers[name]
        for chain in worker.chains.values():
            self._unmark(chain, name)
        worker.chains.clear()
        worker.orphans.clear()
        worker.waiting.clear()
        self.used_bytes -= worker.used_bytes
        worker.used_bytes = 0

    def store(self, name: str, event: Stored) -> bool:
        """`name` holds these blocks now. False: there was no room for all of them."""
        worker, size = self._workers[name], 4 * event.block_size
        worker.block_size = event.block_size
        parent = event.parent
        root = root_of("", event.adapter, event.salt) if parent is None else None
        before = root if parent is None else worker.chains.get(parent)
        for i, block in enumerate(event.hashes):
            if block in worker.chains:
                before = worker.chains[block]
            elif block in worker.orphans:
                before = None
            else:
                extra = event.extra[i] if event.extra else None
                key = (event.tokens[i * size : (i + 1) * size], repr(extra) if extra else "")
                cost = BLOCK_BYTES + (size if before is None else 0)
                if self.used_bytes + cost > self._max_bytes:
                    return False
                worker.used_bytes += cost
                self.used_bytes += cost
                if before is None:
                    assert parent is not None, "a block without a parent stands at the root"
                    worker.orphans[block] = _Orphan(parent, key)
                    worker.waiting.setdefault(parent, []).append(block)
                else:
                    before = _next(before, key)
                    self._place(name, worker, block, before)
            parent = block
        return True

    def remove(self, name: str, hashes: Sequence[Hash]) -> None:
        """`name` holds these blocks no more. Unknown ones are passed over."""
        worker = self._workers[name]
        for block in hashes:
            chain = worker.chains.pop(block, None)
            if chain is not None:
                self._unmark(chain, name)
                self._spend(worker, -BLOCK_BYTES)
            elif (orphan := worker.orphans.pop(block, None)) is not None:
                siblings = worker.waiting[orphan.parent]
                siblings.remove(block)
                if not siblings:
                    del worker.waiting[orphan.parent]
                self._spend(worker, -BLOCK_BYTES - len(orphan.key[0]))

    def match_with(
        self, chain: Sequence[int], names: Sequence[str], more: Callable[[int], int]
    ) -> tuple[int, ...]:
        """As `match`, where a block also counts for the workers whose bits `more` has."""
        counts = dict.fromkeys(names, 0)
        alive = 0
        for name in names:
            alive |= self._bits[name]
        masks = self._masks
        for n, chunk in enumerate(chain, 1):
            alive &= masks.get(chunk, 0) | more(chunk)
            if not alive:
                break
            for name in names:
                if self._bits[name] & alive:
                    counts[name] = n
        return tuple(counts.values())

    def _place(self, name: str, worker: _Worker, block: Hash, chain: int) -> None:
        """The block, and the orphans that follow it."""
        worker.chains[block] = chain
        self._mark(chain, name)
        if block not in worker.waiting:
            return
        todo = [(child, chain) for child in worker.waiting.pop(block)]
        while todo:
            block, before = todo.pop()
            orphan = worker.orphans.pop(block)
            self._spend(worker, -len(orphan.key[0]))
            chain = worker.chains[block] = _next(before, orphan.key)
            self._mark(chain, name)
            todo += [(child, chain) for child in worker.waiting.pop(block, ())]

    def _spend(self, worker: _Worker, size_bytes: int) -> None:
        worker.used_bytes += size_bytes
        self.used_bytes += size_bytes

    def check(self) -> None:
        """Raise AssertionError unless both directions and the sums agree."""
        masks: dict[int, int] = {}
        total = 0
        for name, worker in self._workers.items():
            for chain in worker.chains.values():
                masks[chain] = masks.get(chain, 0) | self._bits[name]
            assert not worker.chains.keys() & worker.orphans.keys(), "placed, and yet an orphan"
            assert not worker.chains.keys() & worker.waiting.keys(), "waits for what is held"
            waiting = sorted(repr(b) for group in worker.waiting.values() for b in group)
            assert waiting == sorted(map(repr, worker.orphans)), "orphans and those that wait"
            used = BLOCK_BYTES * (len(worker.chains) + len(worker.orphans))
            used += sum(len(orphan.key[0]) for orphan in worker.orphans.values())
            assert worker.used_bytes == used, f"{worker.used_bytes} bytes counted, {used} are used"
            total += used
        assert masks == self._masks, "workers' blocks and blocks' workers disagree"
        assert self.used_bytes == total <= self._max_bytes


def _next(before: int, key: tuple[bytes, str]) -> int:
    tokens, extra = key
    return hash((before, tokens, extra)) if extra else hash((before, tokens))

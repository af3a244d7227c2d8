"""Which worker holds which blocks, as its own events say.

A worker's hashes mean nothing here: they only link its events. Where a block stands follows from
the token ids on the way to it, so workers with other hashes, and requests that nobody hashed but
us, meet in the same chain of integers (see `prefix_index.token_chain`).

Groups: of a worker that tells of several, blocks are placed by what the first of those that keep
all tokens says. Of the others it is enough to know hashes, for nothing is hit that the first does
not hold. A prefix counts where all groups without a window have all of its blocks and each of the
others those of the last window before its end, which is the rule of engines (`kv.room.reusable`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.gateway.kv_wire import Hash, Stored
from headrace.gateway.prefix_index import Holders, mark, root_of, unmark
from headrace.kv.room import reusable

BLOCK_BYTES = 512  # of one block at one worker without its tokens, upper bound; tests measure it
ALSO_BYTES = 320  # of the same block in one more group
MAX_GROUPS = 64  # of one worker


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
        self.promised: tuple[int, ...] = ()  # windows of groups that it is known to have
        self.forget_groups()

    def forget_groups(self) -> None:
        """What its events said of its groups."""
        self.groups: dict[int, tuple[int, int]] = {}  # group -> window, tokens of a block
        self.main: int | None = None  # the one that places blocks
        self.others: dict[int, set[Hash]] = {}  # every other group -> blocks that it holds
        # Window -> what its groups hold, the main one left out; of one promised, [] until it comes.
        self.by_window: dict[int, list[set[Hash]]] = {0: []}
        self.by_window |= {window: [] for window in self.promised}
        self.fault = ""  # what its events cannot say; none of them counts from then on
        self.odd = self.oddity()

    def oddity(self) -> str:
        """Why nothing can be said of what it holds; "" = it can."""
        windows = {window for window, _ in self.groups.values()}.union(self.promised)
        if self.fault:
            return self.fault
        if windows and 0 not in windows:
            return "all of its layers have a window"
        if len({size for _, size in self.groups.values()}) > 1:
            return "its KV groups have blocks of several sizes"
        return ""

    def whole(self, window: int, block: Hash) -> bool:
        """All groups with this window, but for the main one, hold the block."""
        groups = self.by_window[window]
        return all(block in held for held in groups) if groups else not window


class BlockIndex(Holders):
    """Blocks by worker, within one budget of bytes. What does not fit is not held here."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._workers: dict[str, _Worker] = {}
        # Window -> chunk -> bits of the workers whose layers with that window hold it.
        self._near: dict[int, dict[int, int]] = {0: self._masks}
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
        """How many blocks `name` is known to hold: those of a sequence, in however many groups."""
        worker = self._workers[name]
        return len(worker.chains) + len(worker.orphans)

    def odd(self, name: str) -> str:
        """Why nothing can be said of what `name` holds; "" = it can."""
        return self._workers[name].odd

    def promise(self, name: str, windows: Sequence[int]) -> None:
        """`name` has groups with these windows (0 = none), whether it told of them yet or not.

        It is thought to hold nothing then.
        """
        self._workers[name].promised = tuple(windows)
        self.clear(name)

    def clear(self, name: str) -> None:
        """`name` holds nothing."""
        worker = self._workers[name]
        for window in worker.by_window:
            self._unmark_all(name, worker, window)
        worker.chains.clear()
        worker.orphans.clear()
        worker.waiting.clear()
        self.used_bytes -= worker.used_bytes
        worker.used_bytes = 0
        worker.forget_groups()

    def store(self, name: str, event: Stored) -> bool:
        """`name` holds these blocks now. False: there was no room for all of them."""
        worker, size = self._workers[name], 4 * event.block_size
        known = (event.window, event.block_size)
        if not worker.fault and worker.groups.get(event.group) != known:
            self._learn(name, worker, event)
        if worker.fault:
            return True
        if event.group != worker.main:
            return self._store_also(name, worker, event)
        parent = event.parent
        root = root_of("", event.adapter, event.salt) if parent is None else None
        before = root if parent is None else worker.chains.get(parent)
        for i, block in enumerate(event.hashes):
            if block in worker.chains:
                before = worker.chains[block]
            elif block in worker.orphans:
                before = None
            else:
                extra = event.extra[i] if event.extra else ""
                key = (event.tokens[i * size : (i + 1) * size], extra)
                if not self._spend(worker, BLOCK_BYTES + (size if before is None else 0)):
                    return False
                if before is None:
                    assert parent is not None, "a block without a parent stands at the root"
                    worker.orphans[block] = _Orphan(parent, key)
                    worker.waiting.setdefault(parent, []).append(block)
                else:
                    before = _next(before, key)
                    self._place(name, worker, block, before)
            parent = block
        return True

    def _learn(self, name: str, worker: _Worker, event: Stored) -> None:
        """A group is heard of for the first time, or is another one than it was."""
        group, window = event.group, event.window
        worker.block_size = event.block_size
        if worker.groups.get(group, (window, 0))[0] != window:
            worker.fault = f"the window of its KV group {group} changed"
        elif len(worker.groups) == MAX_GROUPS and group not in worker.groups:
            worker.fault = f"it has more than {MAX_GROUPS} KV groups"
        elif group not in worker.groups:
            if not window and worker.main is None:
                worker.main = group
            else:
                self._unmark_all(name, worker, window)  # the new one holds nothing yet
                held = worker.others[group] = set()
                worker.by_window.setdefault(window, []).append(held)
                self._near.setdefault(window, {})
        if not worker.fault:
            worker.groups[group] = window, event.block_size
        worker.odd = worker.oddity()

    def _store_also(self, name: str, worker: _Worker, event: Stored) -> bool:
        """In a group that places no blocks."""
        held, masks, bit = worker.others[event.group], self._near[event.window], self._bits[name]
        for block in event.hashes:
            if block in held:
                continue
            if not self._spend(worker, ALSO_BYTES):
                return False
            held.add(block)
            chain = worker.chains.get(block)
            if chain is not None and worker.whole(event.window, block):
                mark(masks, chain, bit)
        return True

    def remove(self, name: str, hashes: Sequence[Hash], group: int | None = None) -> None:
        """`name` holds these blocks no more, in this group or (None) in any. Unknown ones are
        passed over."""
        worker = self._workers[name]
        for other in worker.others if group is None else [group]:
            if other in worker.others:
                self._remove_also(name, worker, hashes, other)
        if group is not None and group != worker.main:
            return
        bit, known = self._bits[name], [self._near[w] for w in worker.by_window if w in self._near]
        for block in hashes:
            chain = worker.chains.pop(block, None)
            if chain is not None:
                for masks in known:
                    unmark(masks, chain, bit)
                self._spend(worker, -BLOCK_BYTES)
            elif (orphan := worker.orphans.pop(block, None)) is not None:
                siblings = worker.waiting[orphan.parent]
                siblings.remove(block)
                if not siblings:
                    del worker.waiting[orphan.parent]
                self._spend(worker, -BLOCK_BYTES - len(orphan.key[0]))

    def _remove_also(self, name: str, worker: _Worker, hashes: Sequence[Hash], group: int) -> None:
        held, masks = worker.others[group], self._near[worker.groups[group][0]]
        for block in hashes:
            if block in held:
                held.remove(block)
                self._spend(worker, -ALSO_BYTES)
                if block in worker.chains:
                    unmark(masks, worker.chains[block], self._bits[name])

    def match_with(
        self, chain: Sequence[int], names: Sequence[str], more: Callable[[int], int]
    ) -> tuple[int, ...]:
        """How many leading chunks of `chain` each of `names` can use again, where a chunk also
        counts, in all groups, for the workers whose bits `more` has."""
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
        for name, n in counts.items():
            if n and len(self._workers[name].by_window) > 1:
                counts[name] = self._near_end(chain, name, n, more)
        return tuple(counts.values())

    def _near_end(
        self, chain: Sequence[int], name: str, end: int, more: Callable[[int], int]
    ) -> int:
        """Of the first `end` chunks of `chain`, those of which the windows before their end are
        there too."""
        worker, bit, none = self._workers[name], self._bits[name], dict[int, int]()
        masks = {w: self._near.get(w, none) for w in worker.by_window if w}

        def holds(window: int, at: int) -> bool:
            return bool((masks[window].get(chain[at], 0) | more(chain[at])) & bit)

        return reusable(end, masks, worker.block_size, holds)

    def _place(self, name: str, worker: _Worker, block: Hash, chain: int) -> None:
        """The block, and the orphans that follow it."""
        self._put(name, worker, block, chain)
        if block not in worker.waiting:
            return
        todo = [(child, chain) for child in worker.waiting.pop(block)]
        while todo:
            block, before = todo.pop()
            orphan = worker.orphans.pop(block)
            self._spend(worker, -len(orphan.key[0]))
            chain = _next(before, orphan.key)
            self._put(name, worker, block, chain)
            todo += [(child, chain) for child in worker.waiting.pop(block, ())]

    def _put(self, name: str, worker: _Worker, block: Hash, chain: int) -> None:
        worker.chains[block] = chain
        bit = self._bits[name]
        if not worker.others:
            mark(self._masks, chain, bit)
            return
        for window in worker.by_window:
            if worker.whole(window, block):
                mark(self._near[window], chain, bit)

    def _unmark_all(self, name: str, worker: _Worker, window: int) -> None:
        masks = self._near.get(window, {})
        for chain in worker.chains.values():
            unmark(masks, chain, self._bits[name])

    def _spend(self, worker: _Worker, size_bytes: int) -> bool:
        """False: there is no room for them."""
        if self.used_bytes + size_bytes > self._max_bytes:
            return False
        worker.used_bytes += size_bytes
        self.used_bytes += size_bytes
        return True

    def check(self) -> None:
        """Raise AssertionError unless both directions and the sums agree."""
        masks: dict[int, dict[int, int]] = {window: {} for window in self._near}
        total = 0
        for name, worker in self._workers.items():
            for block, chain in worker.chains.items():
                for window in worker.by_window:
                    if worker.whole(window, block):
                        mark(masks[window], chain, self._bits[name])
            assert not worker.chains.keys() & worker.orphans.keys(), "placed, and yet an orphan"
            assert not worker.chains.keys() & worker.waiting.keys(), "waits for what is held"
            waiting = sorted(repr(b) for group in worker.waiting.values() for b in group)
            assert waiting == sorted(map(repr, worker.orphans)), "orphans and those that wait"
            used = BLOCK_BYTES * (len(worker.chains) + len(worker.orphans))
            used += sum(len(orphan.key[0]) for orphan in worker.orphans.values())
            used += ALSO_BYTES * sum(map(len, worker.others.values()))
            assert worker.used_bytes == used, f"{worker.used_bytes} bytes counted, {used} are used"
            total += used
        assert masks == self._near, "workers' blocks and blocks' workers disagree"
        assert self.used_bytes == total <= self._max_bytes


def _next(before: int, key: tuple[bytes, str]) -> int:
    tokens, extra = key
    return hash((before, tokens, extra)) if extra else hash((before, tokens))

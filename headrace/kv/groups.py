"""GroupedCache: the KV memory of a model with layers that see their newest tokens alone.

Layers stand in groups of equal size, so that a block of the pool (`block_size` tokens in every
layer of one group) fits each of them: one pool, one table a group. A group has a window, or keeps
every token (window 0). A query of a group with a window reads itself and the `window` - 1 tokens
before it.

A table gives a group's blocks back as soon as they are out of the window of every position that is
still to be computed. No fence is needed for that: steps in flight compute positions from the
committed ones on, and so read none of these blocks. What was given back can be hit until it is
handed out again.

A prefix is hit where groups without a window have all of its blocks and each of the others has
those of the last window before its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from headrace.kv.cache import Grant, KVCache, Table
from headrace.kv.events import EventLog, Scope, groups_of
from headrace.kv.prefix import DIGEST_BYTES
from headrace.kv.room import first_read, most_held, of_group, reusable


class GroupTable(Table):
    """lanes[group][index] -> block. Blocks [0, gone[group]) of a lane are not held any more.

    The first group's are `blocks` and `freed` too. Groups with equal windows move together.
    """

    __slots__ = ("_length", "gone", "lanes")

    def __init__(self, root: bytes, scope: Scope, groups: int) -> None:
        super().__init__(root, scope)
        self.fill([[] for _ in range(groups)], [0] * groups)

    def fill(self, lanes: list[list[int]], gone: list[int]) -> None:
        """These are its blocks from now on."""
        self.lanes, self.gone = lanes, gone
        self.blocks, self.freed = lanes[0], gone[0]
        self._length = max(map(len, lanes))

    @property
    def held(self) -> list[int]:
        """See `Table`: by their place in the sequence."""
        places = (
            (i, block)
            for lane, gone in zip(self.lanes, self.gone, strict=True)
            for i, block in enumerate(lane[gone:], gone)
        )
        return [block for _, block in sorted(places, key=lambda place: place[0])]

    @property
    def size(self) -> int:
        """See `Table`."""
        return sum(map(len, self.lanes)) - sum(self.gone)

    @property
    def length(self) -> int:
        """See `Table`."""
        return self._length

    def asked(self, blocks: int) -> None:
        """Room for so many blocks of a sequence was asked for."""
        self._length = max(self._length, blocks)

    def groups(self) -> list[list[int]]:
        """See `Table`."""
        return [lane.copy() for lane in self.lanes]

    def pass_by(self, group: int, blocks: int) -> None:
        """The first `blocks` blocks of the group are not held any more."""
        self.gone[group] = blocks
        self.freed = self.gone[0]

    def clear(self) -> None:
        """See `Table`."""
        self.fill([[] for _ in self.lanes], [0] * len(self.lanes))
        self.published = 0

    def check(self) -> None:
        """See `Table`."""
        assert self.blocks is self.lanes[0], "the first lane is another one"
        assert self.freed == self.gone[0], "the first lane gave back something else"
        assert any(self.lanes), "an empty table is registered as a holder"
        for lane, gone in zip(self.lanes, self.gone, strict=True):
            assert gone < len(lane), "nothing is held of a lane"
            assert self.published <= len(lane) <= self._length, "a lane of another length"
        assert len(set(self.held)) == self.size, "a block twice in one table"
        assert self.published <= len(self.digests), "published without a digest"


class GroupedCache(KVCache):
    """`windows`: of each group, in tokens; 0 = it keeps all.

    Blocks are those of the pool, where nothing else is said: a block of a sequence is one of each
    group that holds it.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        *,
        windows: Sequence[int],
        log_events: bool = False,
    ) -> None:
        super().__init__(blocks, block_size, prefix_caching, log_events=log_events)
        assert min(windows) >= 0, f"windows of {windows} tokens"
        self.windows = tuple(windows)
        self._whole = [g for g, window in enumerate(windows) if not window]
        self._near = [g for g, window in enumerate(windows) if window]
        self._by_window = {w: [g for g in self._near if windows[g] == w] for w in windows if w}
        # The index has one key a block: the digest in the first group, more behind it in others.
        self._tails = [b"", *(group.to_bytes(2, "little") for group in range(1, len(windows)))]
        self._told = groups_of(windows)  # events tell of these
        self._alike = [[g for g, own in enumerate(windows) if own == w] for w in self._told]

    def open(self, salt: str, adapter: str, variant: str = "") -> GroupTable:
        """See `KVCache`."""
        plain = super().open(salt, adapter, variant)
        return GroupTable(plain.root, plain.scope, len(self.windows))

    # ------------------------------------------------------------ how much

    def _most(self, group: int, blocks: int) -> int:
        """Blocks that a sequence of so many holds in one group while it decodes."""
        return of_group(self.windows[group], self.block_size, blocks)

    def most_held(self, blocks: int) -> int:
        """See `KVCache`."""
        return most_held(self.windows, self.block_size, blocks)

    def claim(self, table: Table, upto_tokens: int) -> int:
        """See `KVCache`."""
        assert isinstance(table, GroupTable), "a table of another cache"
        blocks = self.blocks_for(upto_tokens)
        held = ((g, len(table.lanes[g]) - table.gone[g]) for g in self._near)
        return sum(max(0, self._most(g, blocks) - n) for g, n in held)

    def writable(self, table: Table) -> int:
        """See `KVCache`."""
        assert isinstance(table, GroupTable), "a table of another cache"
        return min(map(len, table.lanes)) * self.block_size

    def reach(self, table: Table, spare_blocks: int) -> int:
        """See `KVCache`."""
        assert isinstance(table, GroupTable), "a table of another cache"
        if not self._near:
            return self.writable(table)
        free = self._pool.free - spare_blocks * len(self.windows)
        near = min(len(table.lanes[g]) for g in self._near) + max(0, free) // len(self._near)
        return min([near, *(len(table.lanes[g]) for g in self._whole)]) * self.block_size

    # ------------------------------------------------------------ hits

    def probe(
        self, table: Table, tokens: Sequence[int], upto_tokens: int, *, stepwise: bool = False
    ) -> int:
        """See `KVCache`."""
        references, blocks = self._pool.references, self.blocks_for(upto_tokens)
        end, hits = self._found(table, tokens)
        need = sum(1 for lane in hits for block in lane if references[block] == 0)
        for group, lane in enumerate(hits):
            new = blocks - end
            if stepwise and self.windows[group]:  # at least the block that is written next
                new = max(min(new, 1), self._most(group, blocks) - len(lane))
            need += new
        return need

    def hits(self, table: Table, tokens: Sequence[int]) -> int:
        """See `KVCache`."""
        return self._found(table, tokens)[0]

    def match(self, table: Table, tokens: Sequence[int]) -> int:
        """See `KVCache`."""
        assert isinstance(table, GroupTable), "a table of another cache"
        assert not table.blocks, "match on a table that holds blocks"
        end, hits = self._found(table, tokens)
        if not end:
            return 0
        for block in chain(*hits):
            self._pool.hold(block)
        gone = [end - len(lane) for lane in hits]
        lanes = [lane[:1] * n + lane for lane, n in zip(hits, gone, strict=True)]
        table.fill(lanes, gone)
        table.published = end
        self._tables.add(table)
        return end * self.block_size

    def _found(self, table: Table, tokens: Sequence[int]) -> tuple[int, list[list[int]]]:
        """The longest prefix that can be hit, in blocks of a sequence, and the blocks of each group
        that its last token, which may have to be computed again, or a later one reads."""
        if not self.prefix_caching:
            return 0, [[] for _ in self.windows]
        end, get, tails = len(tokens) // self.block_size, self._index.get, self._tails
        for group in self._whole:
            at = 0
            while at < end and get(self._digest(table, tokens, at) + tails[group]) is not None:
                at += 1
            end = at
        for at in range(len(table.digests), end):
            self._digest(table, tokens, at)
        digests = table.digests

        def holds(window: int, at: int) -> bool:
            return all(get(digests[at] + tails[g]) is not None for g in self._by_window[window])

        end = reusable(end, self._by_window, self.block_size, holds)
        hits = []
        for window, tail in zip(self.windows, tails, strict=True):
            read = digests[first_read(window, self.block_size, end) : end]
            found = (get(digest + tail) for digest in read)
            hits.append([block for block in found if block is not None])
        return end, hits

    # ------------------------------------------------------------ changes

    def reserve(
        self, table: Table, upto_tokens: int, write_from: int, soon: int | None = None
    ) -> Grant | None:
        """See `KVCache`."""
        assert isinstance(table, GroupTable), "a table of another cache"
        blocks, first = self.blocks_for(upto_tokens), write_from // self.block_size
        near = blocks if soon is None else min(blocks, self.blocks_for(soon))
        references, lanes = self._pool.references, table.lanes
        shared = [
            (group, i)
            for group, lane in enumerate(lanes)
            for i in range(max(first, table.gone[group]), len(lane))
            if references[lane[i]] > 1
        ]
        new = [
            max(0, (near if window else blocks) - len(lane))
            for window, lane in zip(self.windows, lanes, strict=True)
        ]
        if len(shared) + sum(new) > self._pool.free:
            return None
        firsts, copies = [len(lane) for lane in lanes], []
        for group, i in shared:
            source, target = lanes[group][i], self._take()
            if i * self.block_size < write_from:
                copies.append((source, target))
                self._sources.append(source)
            self._pool.drop(source, reusable=True)  # others still hold it
            lanes[group][i], firsts[group] = target, min(firsts[group], i)
        for count, lane in zip(new, lanes, strict=True):
            lane.extend([self._take() for _ in range(count)])
        table.asked(blocks)
        if any(lanes):
            self._tables.add(table)
        changed = [(g, at, lanes[g][at:]) for g, at in enumerate(firsts)]
        return Grant(firsts[0], changed[0][2], copies, [one for one in changed[1:] if one[2]])

    def commit(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        """See `KVCache`; then gives back what no later position reads."""
        assert isinstance(table, GroupTable), "a table of another cache"
        if self.prefix_caching:
            self._publish(table, tokens, computed // self.block_size)
        for window, groups in self._by_window.items():
            lanes, gone = [table.lanes[g] for g in groups], table.gone[groups[0]]
            # At least one stays, for a lane of blocks without a holder would be none.
            outside = min((computed + 1 - window) // self.block_size, len(lanes[0]) - 1)
            if outside > gone:
                self._free([lane[i] for i in range(gone, outside) for lane in lanes])
                for group in groups:
                    table.pass_by(group, outside)

    def _publish(self, table: GroupTable, tokens: Sequence[int], upto: int) -> None:
        """Blocks of the sequence before `upto` are full."""
        size, log, begin = self.block_size, self._log, table.published
        for i in range(begin, upto):
            self._digest(table, tokens, i)
        for told, groups in enumerate(self._alike):
            for i in range(begin, upto):
                digest = table.digests[i]
                keys = ((digest + self._tails[g], table.lanes[g][i]) for g in groups)
                # Some layers may have had it all along; now all have it.
                if sum([self._index.put(*key) for key in keys]) and log is not None:
                    parent = table.digests[i - 1] if i else None
                    ids = tokens[i * size : (i + 1) * size]
                    log.stored(table.scope, parent, digest, ids, told)
        table.published = max(begin, upto)

    def _tell_removed(self, log: EventLog, key: bytes) -> None:
        """See `KVCache`: the first of groups with equal windows that loses a block is told."""
        digest, group = key[:DIGEST_BYTES], int.from_bytes(key[DIGEST_BYTES:], "little")
        told = self._told.index(self.windows[group])
        others = (digest + self._tails[g] for g in self._alike[told] if g != group)
        if all(self._index.get(other) is not None for other in others):
            log.removed(digest, told)

    def fork(self, table: Table) -> Table:
        """See `KVCache`."""
        assert isinstance(table, GroupTable), "a table of another cache"
        twin = GroupTable(table.root, table.scope, len(self.windows))
        twin.digests, twin.published = table.digests.copy(), table.published
        lanes = [
            lane[gone : gone + 1] * gone + lane[gone:]  # what nobody holds is not named
            for lane, gone in zip(table.lanes, table.gone, strict=True)
        ]
        twin.fill(lanes, table.gone.copy())
        twin.asked(table.length)
        for block in twin.held:
            self._pool.hold(block)
        if any(lanes):
            self._tables.add(twin)
        return twin

"""KVCache: the facade through which the scheduler holds, shares and gives back KV memory.

One KV group: every layer keeps every token (`groups.GroupedCache` is for models with layers that
do not). Life of a table:

    open -> match (take cached blocks) -> reserve (room for what will be written) -> commit (publish
    full blocks once a finished step computed them) -> release (through the step fence)

Who may write: position p of a table is written only into a block with one reference, or past every
published block. Published blocks are full and never written again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice, repeat

from headrace.kv.events import EventLog, KVEvent, Scope
from headrace.kv.pool import BlockPool
from headrace.kv.prefix import PrefixIndex, block_digest, chain, root_digest
from headrace.kv.room import longest, tokens_kept

_STATES = bytes.maketrans(b"\1\2", b"\2\3")  # references, at most 2 -> see `KVCache.states`
_NO_SCOPE = Scope()
_COMPARED = 16  # blocks at once


class Table:
    """What one sequence holds. Only KVCache changes it.

    `digests[i]` is the chain digest of block i of the sequence's tokens; it depends on tokens alone
    and so outlives a release. Blocks [0, published) need no more publishing. Blocks [0, freed) are
    not held any more: nothing reads them, and their ids mean nothing.
    """

    __slots__ = ("blocks", "digests", "freed", "published", "root", "scope")

    def __init__(self, root: bytes, scope: Scope = _NO_SCOPE) -> None:
        self.root, self.scope = root, scope
        self.blocks: list[int] = []
        self.digests: list[bytes] = []
        self.published = self.freed = 0

    @property
    def held(self) -> list[int]:
        """The blocks that it holds a reference on, those that are given up last first."""
        return self.blocks[self.freed :]

    @property
    def size(self) -> int:
        """How many those are."""
        return len(self.blocks) - self.freed

    @property
    def length(self) -> int:
        """How far room was asked for, in blocks of a sequence."""
        return len(self.blocks)

    def groups(self) -> list[list[int]]:
        """[kv group][index] -> block, for a runner's tables. Copies."""
        return [self.blocks.copy()]

    def clear(self) -> None:
        """It holds nothing any more; nobody is told."""
        self.blocks = []
        self.published = self.freed = 0

    def check(self) -> None:
        """Raise AssertionError with a message if it is not a table that holds blocks."""
        assert self.blocks, "an empty table is registered as a holder"
        assert self.freed < len(self.blocks), "nothing is held of a table that has blocks"
        assert len(set(self.held)) == len(self.held), "a block twice in one table"
        assert self.published <= len(self.blocks), "published more than it holds"
        assert self.published <= len(self.digests), "published without a digest"


class Grant:
    """What `reserve` changed, after `copies` (source, target).

    table.blocks[first:] == blocks; `more` says the same of further KV groups: (group, first,
    blocks).
    """

    __slots__ = ("blocks", "copies", "first", "more")

    def __init__(
        self,
        first: int,
        blocks: list[int],
        copies: list[tuple[int, int]],
        more: Sequence[tuple[int, int, list[int]]] = (),
    ) -> None:
        self.first = first
        self.blocks = blocks
        self.copies = copies
        self.more = more


class KVCache:
    """`blocks` blocks of `block_size` tokens. Loop thread only; integers only.

    log_events: what enters and leaves the prefix index is kept until `take_events`.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        *,
        log_events: bool = False,
    ) -> None:
        assert block_size > 0, f"a block of {block_size} tokens"
        self.block_size = block_size
        self.windows: tuple[int, ...] = (0,)  # of each KV group, in tokens; 0 = it keeps all
        self.prefix_caching = prefix_caching
        self._pool = BlockPool(blocks)
        self._index = PrefixIndex()
        self._log = EventLog() if log_events else None
        self._tables: set[Table] = set()  # those that hold blocks
        self._limbo: deque[tuple[int, list[int]]] = deque()  # (step, blocks tail first)
        self._limbo_blocks = 0
        self._sources: list[int] = []  # of copies that no step has yet
        self._guarded: dict[int, int] = {}  # block -> unfinished step that copies it
        self._finished = 0  # newest finished step
        self.evicted: list[int] | None = None  # blocks whose prefix was given up; None: not noted

    @property
    def size(self) -> int:
        """Blocks in all."""
        return self._pool.size

    @property
    def free_blocks(self) -> int:
        """Blocks that `reserve` can hand out now; some still hold a prefix that can be hit."""
        return self._pool.free

    @property
    def used_blocks(self) -> int:
        """Blocks held by tables or waiting behind the fence."""
        return self._pool.size - self._pool.free

    @property
    def limbo_blocks(self) -> int:
        """References that wait behind the fence; shared blocks count once per reference."""
        return self._limbo_blocks

    @property
    def cached_blocks(self) -> int:
        """Free blocks that a prefix can hit."""
        return self._pool.reusable

    def states(self) -> bytes:
        """By block: 0 free, 1 free and can be hit, 2 held, 3 held by several. O(blocks)."""
        states = bytearray(map(min, self._pool.references, repeat(2))).translate(_STATES)
        for block in self._pool.reusable_blocks():
            states[block] = 1
        return bytes(states)

    @property
    def finished_step(self) -> int:
        """The newest step that has finished."""
        return self._finished

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a sequence that `tokens` tokens fill."""
        return -(-tokens // self.block_size)

    def most_held(self, blocks: int) -> int:
        """Blocks of the pool that a sequence of so many blocks holds while it decodes."""
        return blocks

    @property
    def kept_tokens(self) -> int:
        """Tokens that it keeps in every layer; see `room.tokens_kept`."""
        return tokens_kept(self._pool.size, len(self.windows), self.block_size)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence that it holds."""
        return longest(self._pool.size, self.most_held) * self.block_size

    def claim(self, table: Table, upto_tokens: int) -> int:
        """Blocks of the pool that it will hold beyond those it has, once it has computed so far;
        of what `reserve` was asked for already."""
        return 0

    def writable(self, table: Table) -> int:
        """Tokens for which it has room in every layer."""
        return len(table.blocks) * self.block_size

    def reach(self, table: Table, spare_blocks: int) -> int:
        """Tokens for which it has room, or could have without another `reserve` of its own kind
        failing: so many blocks of a sequence stay free for others."""
        return len(table.blocks) * self.block_size

    def open(self, salt: str, adapter: str, variant: str = "") -> Table:
        """A table without blocks for one sequence; it shares within these three alone."""
        return Table(root_digest(adapter, salt, variant), Scope(adapter, salt, variant))

    def probe(
        self, table: Table, tokens: Sequence[int], upto_tokens: int, *, stepwise: bool = False
    ) -> int:
        """Blocks that `match` and then `reserve(upto_tokens)` would take off the free list.

        stepwise: layers with a window get their room as the sequence goes on; see `reserve`.
        """
        references = self._pool.references
        hits = self._hits(table, tokens)
        revived = sum(1 for block in hits if references[block] == 0)
        return self.blocks_for(upto_tokens) - len(hits) + revived

    def hits(self, table: Table, tokens: Sequence[int]) -> int:
        """Blocks of a sequence that `match` would find."""
        return len(self._hits(table, tokens))

    def digests(self, table: Table, tokens: Sequence[int], first: int, end: int) -> list[bytes]:
        """Of blocks [first, end) of the sequence, all of them full: what the prefix index knows
        them by once they are computed."""
        known, size = table.digests, self.block_size
        if len(known) < end:
            parent = known[-1] if known else table.root
            known += chain(parent, tokens[len(known) * size : end * size], size)
        return known[first:end]

    def borrow(
        self, table: Table, tokens: Sequence[int], lender: Table, lent: Sequence[int]
    ) -> None:
        """Take over the digests that another sequence has of blocks with which both begin: tokens
        are compared in a fifth of the time that their digests take."""
        size, at = self.block_size, len(table.digests)
        most = min(len(tokens) // size, len(lender.digests))
        if at >= most or table.root != lender.root:
            return
        if at and table.digests[at - 1] != lender.digests[at - 1]:
            return  # they have parted before
        for stride in (_COMPARED, 1):
            while at < most:
                end = min(at + stride, most)
                if tokens[at * size : end * size] != lent[at * size : end * size]:
                    break
                at = end
        table.digests += lender.digests[len(table.digests) : at]

    def match(self, table: Table, tokens: Sequence[int]) -> int:
        """Take references on the longest cached prefix of `tokens`; returns its tokens.

        Full blocks only; it is the whole of `tokens` when that is a multiple of the block size.
        Needs: the table holds nothing.
        """
        assert not table.blocks, "match on a table that holds blocks"
        hits = self._hits(table, tokens)
        for block in hits:
            self._pool.hold(block)
        if hits:
            table.blocks, table.published = hits, len(hits)
            self._tables.add(table)
        return len(hits) * self.block_size

    def _hits(self, table: Table, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix."""
        if not self.prefix_caching:
            return []
        full, known = len(tokens) // self.block_size, len(table.digests)
        hits = self._index.leading(islice(table.digests, full))
        if len(hits) == known:  # what was digested is there; no more is than tells the first miss
            for i in range(known, full):
                block = self._index.get(self._digest(table, tokens, i))
                if block is None:
                    break
                hits.append(block)
        return hits

    def _digest(self, table: Table, tokens: Sequence[int], i: int) -> bytes:
        """Digest of block i. Digests are made in order, each once."""
        digests = table.digests
        if i == len(digests):
            ids = tokens[i * self.block_size : (i + 1) * self.block_size]
            digests.append(block_digest(digests[-1] if i else table.root, ids))
        return digests[i]

    def reserve(
        self, table: Table, upto_tokens: int, write_from: int, soon: int | None = None
    ) -> Grant | None:
        """Make [write_from, upto_tokens) writable by this table alone: all of it, or None.

        Appends new blocks; a block of that range that others share is replaced by a new one, and
        copied first when it holds tokens before `write_from`.

        soon: layers with a window get room up to this token for now; None: up to `upto_tokens`.
        """
        held = len(table.blocks)
        first = write_from // self.block_size
        references = self._pool.references
        shared = [i for i in range(first, held) if references[table.blocks[i]] > 1]
        new = max(0, self.blocks_for(upto_tokens) - held)
        if len(shared) + new > self._pool.free:
            return None
        copies: list[tuple[int, int]] = []
        for i in shared:
            source, target = table.blocks[i], self._take()
            if i * self.block_size < write_from:
                copies.append((source, target))
                self._sources.append(source)
            self._pool.drop(source, reusable=True)  # others still hold it
            table.blocks[i] = target
        for _ in range(new):
            table.blocks.append(self._take())
        if table.blocks:
            self._tables.add(table)
        start = shared[0] if shared else held
        return Grant(start, table.blocks[start:], copies)

    def copying(self, step: int) -> None:
        """The copies that `reserve` asked for run in step `step`; what they read stays until then,
        also where all that still hold it are behind an older fence."""
        self._guarded.update(dict.fromkeys(self._sources, step))
        self._sources.clear()

    def _take(self) -> int:
        """A free block; what it held can no longer be hit (this is eviction)."""
        block = self._pool.take()
        key = self._index.forget(block)
        if key is not None:
            if self.evicted is not None:
                self.evicted.append(block)
            if self._log is not None:
                self._tell_removed(self._log, key)
        return block

    def _tell_removed(self, log: EventLog, key: bytes) -> None:
        """A block left the index, where it had this key."""
        log.removed(key)

    def commit(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        """A finished step computed KV up to `computed` tokens: publish the blocks that are full."""
        if not self.prefix_caching:
            return
        size, log = self.block_size, self._log
        for i in range(table.published, computed // size):
            digest = self._digest(table, tokens, i)
            if self._index.put(digest, table.blocks[i]) and log is not None:
                parent = table.digests[i - 1] if i else None
                log.stored(table.scope, parent, digest, tokens[i * size : (i + 1) * size])
            table.published = i + 1

    def fork(self, table: Table) -> Table:
        """A second table over the same blocks; `reserve` copies what either writes next."""
        twin = Table(table.root, table.scope)
        twin.blocks = table.blocks.copy()
        twin.digests = table.digests.copy()
        twin.published = table.published
        for block in twin.blocks:
            self._pool.hold(block)
        if twin.blocks:
            self._tables.add(twin)
        return twin

    def release(self, table: Table, step: int) -> None:
        """Give back all blocks; `step` is the last launched step that may still touch them.

        They are handed out again only once that step has finished. The table can be matched again.
        """
        blocks = table.held[::-1]  # tails are evicted before heads: a hit needs its head
        table.clear()
        self._tables.discard(table)
        if step <= self._finished:
            self._free(blocks)
        elif blocks:
            assert not self._limbo or self._limbo[-1][0] <= step, "release behind a newer release"
            self._limbo.append((step, blocks))
            self._limbo_blocks += len(blocks)

    def fence(self, step: int) -> None:
        """Step `step` and all before it have finished: their released blocks become free."""
        assert step >= self._finished, f"step {step} finished after step {self._finished}"
        self._finished = step
        if self._guarded:
            self._guarded = {block: at for block, at in self._guarded.items() if at > step}
        while self._limbo and self._limbo[0][0] <= step:
            blocks = self._limbo.popleft()[1]
            self._limbo_blocks -= len(blocks)
            self._free(blocks)

    def _free(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self._guarded and self._pool.references[block] == 1:
                self._limbo.append((self._guarded[block], [block]))
                self._limbo_blocks += 1
            else:
                self._pool.drop(block, reusable=block in self._index)

    def take_events(self) -> list[KVEvent]:
        """What entered and left the prefix index since the last call. Needs: `log_events`."""
        assert self._log is not None, "nobody asked for events"
        return self._log.take()

    def check(self) -> None:
        """Raise AssertionError with a message if any invariant is broken. O(blocks)."""
        self._pool.check()
        self._index.check()
        held = Counter(block for table in self._tables for block in table.held)
        held.update(block for _, blocks in self._limbo for block in blocks)
        counted = {b: n for b, n in enumerate(self._pool.references) if n}
        assert counted == dict(held), f"references {counted} but holders {dict(held)}"
        assert self._limbo_blocks == sum(len(blocks) for _, blocks in self._limbo), "limbo count"
        assert all(step > self._finished for step, _ in self._limbo), "limbo past its fence"
        for table in self._tables:
            table.check()

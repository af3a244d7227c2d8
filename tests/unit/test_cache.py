"""KVCache: matching, reserving, copy-on-write, the fence; then random lives of many tables."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kv.cache import KVCache, Table
from headrace.kv.events import Removed, Stored, groups_of
from headrace.kv.groups import GroupedCache, GroupTable
from headrace.kv.prefix import block_digest, root_digest

TOKENS = list(range(100, 164))


Make = Callable[..., KVCache]


def wide(blocks: int, block_size: int, prefix_caching: bool = True) -> GroupedCache:
    """A window that nothing falls out of."""
    return GroupedCache(blocks, block_size, prefix_caching, windows=[1 << 20])


@pytest.fixture(params=[KVCache, wide])
def make(request: pytest.FixtureRequest) -> Make:
    """What makes a cache: every kind of them."""
    made: Make = request.param
    return made


def filled(kv: KVCache, tokens: list[int], salt: str = "", adapter: str = "") -> Table:
    """A table that went through match, reserve and commit."""
    table = kv.open(salt, adapter)
    cached = kv.match(table, tokens)
    assert kv.reserve(table, len(tokens), cached) is not None
    kv.commit(table, tokens, len(tokens))
    kv.check()
    return table


def test_hits_are_full_blocks_of_an_equal_prefix(make: Make) -> None:
    kv = make(16, 4)
    first = filled(kv, TOKENS[:11])
    cases = [(11, 8), (8, 8), (7, 4), (3, 0), (12, 8)]
    for length, cached in cases:
        table = kv.open("", "")
        assert kv.hits(table, TOKENS[:length]) == cached // 4
        assert kv.match(table, TOKENS[:length]) == cached
        assert table.blocks == first.blocks[: cached // 4]
        kv.release(table, 0)
        kv.check()
    other = kv.open("", "")
    assert kv.match(other, [1, *TOKENS[1:11]]) == 0


def test_hits_stay_within_one_salt_and_one_adapter(make: Make) -> None:
    kv = make(64, 4)
    filled(kv, TOKENS[:16], "s1", "X")
    for salt, adapter, cached in [("s1", "X", 16), ("s2", "X", 0), ("", "X", 0), ("s1", "Y", 0)]:
        assert kv.match(kv.open(salt, adapter), TOKENS[:16]) == cached


def test_released_prefixes_are_hit_until_their_blocks_are_handed_out(make: Make) -> None:
    kv = make(4, 4)
    kv.release(filled(kv, TOKENS[:16]), 0)
    assert kv.used_blocks == 0
    assert len(kv._index) == 4
    probe = kv.open("", "")
    assert kv.probe(probe, TOKENS[:16], 16) == 4  # revived blocks leave the free list
    other = filled(kv, [1, 2, 3, 4, 5])  # takes two: the tail of the old prefix goes first
    assert kv.match(probe, TOKENS[:16]) == 8
    kv.release(probe, 0)
    kv.release(other, 0)
    kv.check()


def test_nothing_is_hit_before_it_is_committed(make: Make) -> None:
    kv = make(8, 4)
    table = kv.open("", "")
    assert kv.reserve(table, 8, 0) is not None
    assert kv.match(kv.open("", ""), TOKENS[:8]) == 0
    kv.commit(table, TOKENS[:8], 7)  # the second block is not full
    again = kv.open("", "")
    assert kv.match(again, TOKENS[:8]) == 4
    kv.release(again, 0)
    kv.release(table, 0)
    kv.check()


def test_caching_can_be_off(make: Make) -> None:
    kv = make(8, 4, prefix_caching=False)
    filled(kv, TOKENS[:8])
    assert kv.match(kv.open("", ""), TOKENS[:8]) == 0
    assert len(kv._index) == 0


def test_reserve_is_all_or_nothing(make: Make) -> None:
    kv = make(3, 4)
    table = kv.open("", "")
    assert kv.reserve(table, 13, 0) is None
    assert (kv.used_blocks, table.blocks) == (0, [])
    grant = kv.reserve(table, 12, 0)
    assert grant is not None
    assert (grant.first, grant.blocks, grant.copies) == (0, table.blocks, [])
    nothing = kv.reserve(table, 12, 11)
    assert nothing is not None
    assert nothing.blocks == []


def test_a_duplicate_stays_private(make: Make) -> None:
    kv = make(8, 4)
    first, second = kv.open("", ""), kv.open("", "")
    for table in (first, second):
        assert kv.reserve(table, 4, 0) is not None
    for table in (first, second):
        kv.commit(table, TOKENS[:4], 4)
    third = kv.open("", "")
    kv.match(third, TOKENS[:4])
    assert third.blocks == first.blocks != second.blocks
    kv.check()


def test_forks_copy_the_shared_last_block_and_the_last_writer_keeps_it(make: Make) -> None:
    kv = make(8, 4)
    table = filled(kv, TOKENS[:6])
    twins = [kv.fork(table), kv.fork(table)]
    head, tail = table.blocks
    grant = kv.reserve(twins[0], 7, 6)
    assert grant is not None
    assert grant.copies == [(tail, twins[0].blocks[1])]
    assert (grant.first, twins[0].blocks[0]) == (1, head)
    second = kv.reserve(table, 7, 6)
    assert second is not None
    assert len(second.copies) == 1
    third = kv.reserve(twins[1], 7, 6)
    assert third is not None
    assert (third.copies, twins[1].blocks) == ([], [head, tail])
    kv.check()


def test_what_a_step_copies_stays_until_it_has_finished(make: Make) -> None:
    """Though all that hold it then are behind an older fence."""
    kv = make(8, 4)
    table = filled(kv, TOKENS[:6])
    twins = [kv.fork(table), kv.fork(table)]
    tail = table.blocks[1]
    kv.release(table, 1)  # step 1 may still read it
    for twin in twins:
        assert kv.reserve(twin, 7, 6) is not None
        assert twin.blocks[1] != tail, "a copy each: the third has not given it back"
    kv.copying(2)
    free = kv.free_blocks
    kv.fence(1)
    assert (kv.free_blocks, kv.limbo_blocks) == (free, 1), "step 2 copies it, and runs"
    kv.check()
    kv.fence(2)
    assert (kv.free_blocks, kv.limbo_blocks) == (free + 1, 0)
    kv.check()


def test_a_fork_at_a_block_border_needs_no_copy(make: Make) -> None:
    kv = make(8, 4)
    table = filled(kv, TOKENS[:8])
    twin = kv.fork(table)
    grant = kv.reserve(twin, 9, 8)
    assert grant is not None
    assert (grant.first, grant.copies) == (2, [])
    assert twin.blocks[:2] == table.blocks


def test_a_shared_block_reserved_ahead_is_replaced_but_not_copied(make: Make) -> None:
    kv = make(8, 4)
    table = kv.open("", "")
    assert kv.reserve(table, 12, 0) is not None
    twin = kv.fork(table)
    grant = kv.reserve(twin, 12, 4)
    assert grant is not None
    assert (grant.first, grant.copies) == (1, [])
    assert not set(twin.blocks[1:]) & set(table.blocks)
    kv.check()


def test_the_fence_holds_blocks_back_until_their_step_has_finished(make: Make) -> None:
    kv = make(2, 4)
    table = filled(kv, TOKENS[:8])
    kv.release(table, 5)
    assert (kv.free_blocks, kv.limbo_blocks) == (0, 2)
    assert kv.reserve(kv.open("", ""), 4, 0) is None
    kv.fence(4)
    assert kv.free_blocks == 0
    hit = kv.open("", "")
    assert kv.match(hit, TOKENS[:8]) == 8  # reading them is fine at any time
    kv.fence(5)
    kv.check()
    assert (kv.free_blocks, kv.limbo_blocks, kv.used_blocks) == (0, 0, 2)
    kv.release(hit, 5)
    assert kv.free_blocks == 2


def test_check_finds_a_leak(make: Make) -> None:
    kv = make(4, 4)
    table = filled(kv, TOKENS[:8])
    table.blocks.pop()
    with pytest.raises(AssertionError, match=r"references .* but holders"):
        kv.check()


@pytest.mark.parametrize("windows", [(0, 5, 5), (0, 0, 5), (4, 4)])
def test_a_block_is_told_of_while_all_layers_of_its_group_have_it(windows: tuple[int, ...]) -> None:
    """In a pool that does not part evenly, so that groups in memory lose it one after another."""
    kv = GroupedCache(6 * len(windows) + 1, 2, windows=windows, log_events=True)
    told, chance, part = groups_of(windows), random.Random(5), 0
    mirror: list[set[bytes]] = [set() for _ in told]
    every: set[bytes] = set()
    for step in range(1, 300):
        table, tokens = (
            kv.open("", ""),
            [chance.randrange(2) for _ in range(chance.randrange(2, 9))],
        )
        cached = kv.match(table, tokens)
        assert kv.reserve(table, len(tokens), cached) is not None
        kv.commit(table, tokens, len(tokens))
        every.update(table.digests)
        kv.release(table, step)
        kv.fence(step)
        for event in kv.take_events():
            assert isinstance(event, Stored | Removed)
            for digest in event.digests:
                if isinstance(event, Stored):
                    assert digest not in mirror[event.group], "told twice"
                    mirror[event.group].add(digest)
                else:
                    mirror[event.group].remove(digest)
        for window, known in zip(told, mirror, strict=True):
            tails = [kv._tails[group] for group, own in enumerate(windows) if own == window]
            has = {d: [kv._index.get(d + tail) is not None for tail in tails] for d in every}
            assert known == {digest for digest, each in has.items() if all(each)}
            part += sum(any(each) and not all(each) for each in has.values())
    assert part > 20, "some layers have a block and others lost it"


def gone_of(table: Table) -> list[int]:
    """By group: blocks at its start that are not held any more."""
    return table.gone if isinstance(table, GroupTable) else [table.freed]


class CacheMachine(RuleBasedStateMachine):
    """Tables that do what sequences do, with contents of their own to compare with."""

    @initialize(
        blocks=st.integers(1, 12),
        more=st.integers(0, 2),
        block_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from(
            [(), (), (1,), (3,), (6,), (0, 4), (0, 0, 1), (0, 5, 5), (0, 2, 7), (3, 6)]
        ),
    )
    def start(self, blocks: int, more: int, block_size: int, windows: tuple[int, ...]) -> None:
        """windows: () = a cache that knows no groups. blocks: for each; more: of no one's."""
        self.windows = windows or (0,)
        blocks = blocks * len(self.windows) + more
        self.kv = KVCache(blocks, block_size, log_events=True)
        if windows:
            self.kv = GroupedCache(blocks, block_size, windows=windows, log_events=True)
        # Made of events alone, of each group that they tell of: digest -> its tokens.
        self.mirror: list[dict[bytes, tuple[int, ...]]] = [{} for _ in groups_of(self.windows)]
        self.tables: list[tuple[Table, list[int], int]] = []  # table, tokens, computed
        # Block -> its group, and the prefix it ends.
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.step = self.finished = 0

    def _write(self, table: Table, tokens: list[int], start: int, end: int) -> None:
        size = self.kv.block_size
        others = {block for other, _, _ in self.tables if other != table for block in other.held}
        for group, lane in enumerate(table.groups()):
            for position in range(start, end):
                block = lane[position // size]
                assert block not in others, "a shared block is written"
                self.content[block] = group, tuple(tokens[: position + 1])

    def _told(self, salt: str, tokens: list[int]) -> int:
        """Tokens of a prefix that can be hit, as the events say."""
        size, at, digests = self.kv.block_size, root_digest("", salt), []
        for start in range(0, len(tokens) - size + 1, size):
            at = block_digest(at, tokens[start : start + size])
            digests.append(at)
        groups = list(zip(groups_of(self.windows), self.mirror, strict=True))
        for end in range(len(digests) * size, 0, -size):
            firsts = [max(0, end - (window or end)) // size for window, _ in groups]
            if all(
                digest in mirror
                for first, (_, mirror) in zip(firsts, groups, strict=True)
                for digest in digests[first : end // size]
            ):
                return end
        return 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from("ab"),
        stepwise=st.booleans(),
    )
    def admit(self, tokens: list[int], salt: str, stepwise: bool) -> None:
        tokens = [ord(salt), *tokens]
        table = self.kv.open(salt, "")
        need = self.kv.probe(table, tokens, len(tokens), stepwise=stepwise)
        free = self.kv.free_blocks
        cached = self.kv.match(table, tokens)
        assert cached == self._told(salt, tokens), "who reads the events thinks otherwise"
        size = self.kv.block_size
        for group, (lane, gone) in enumerate(zip(table.groups(), gone_of(table), strict=True)):
            for i, block in enumerate(lane[gone:], gone):
                wanted = group, tuple(tokens[: (i + 1) * size])
                assert self.content[block] == wanted, "a hit of other tokens"
        grant = self.kv.reserve(table, len(tokens), cached, cached + 1 if stepwise else None)
        claim = self.kv.claim(table, len(tokens)) if grant is not None else 0
        if not stepwise:
            assert (grant is not None) == (need <= free)
            assert self.kv.free_blocks == free - need or grant is None
        elif need <= free:
            assert grant is not None, "what was probed is not there"
            near = sum(1 for window in self.windows if window)
            assert need - near <= free - self.kv.free_blocks + claim <= need
        if grant is None:
            self.kv.release(table, self.step)
            return
        computed = cached if stepwise else len(tokens)
        self._write(table, tokens, cached, computed)
        self.tables.append((table, tokens, computed))

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 99), token=st.integers(0, 1), count=st.integers(1, 9))
    def go_on(self, number: int, token: int, count: int) -> None:
        """Of what is known a chunk, as far as memory reaches; else one token more."""
        table, tokens, computed = self.tables.pop(number % len(self.tables))
        known = len(tokens) > computed
        if not known:
            tokens, count = [*tokens, token], 1
        upto = min(len(tokens), computed + count)
        if known:
            upto = min(upto, self.kv.reach(table, 0))
        grant = self.kv.reserve(table, upto, computed)
        if grant is not None:
            for source, target in grant.copies:
                self.content[target] = self.content[source]
            self._write(table, tokens, computed, upto)
            computed = upto
        elif not known:
            tokens = tokens[:-1]
        self.tables.append((table, tokens, computed))

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 99))
    def publish(self, number: int) -> None:
        table, tokens, computed = self.tables[number % len(self.tables)]
        self.kv.commit(table, tokens, computed)

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 99))
    def split(self, number: int) -> None:
        table, tokens, computed = self.tables[number % len(self.tables)]
        self.tables.append((self.kv.fork(table), list(tokens), computed))

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 99))
    def leave(self, number: int) -> None:
        self.kv.release(self.tables.pop(number % len(self.tables))[0], self.step)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from("ab"))
    def come_and_go(self, tokens: list[int], salt: str) -> None:
        """A whole life: what it published stays to be hit, until it is evicted."""
        number = len(self.tables)
        self.admit(tokens, salt, stepwise=False)
        if len(self.tables) > number:
            self.publish(number)
            self.leave(number)
        self.launch()
        self.land()

    @rule()
    def launch(self) -> None:
        self.step += 1

    @rule()
    def land(self) -> None:
        self.finished = min(self.finished + 1, self.step)
        self.kv.fence(self.finished)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check()

    @invariant()
    def events_tell_all(self) -> None:
        """A mirror made of events holds what all layers of a group hold, each block with its own
        tokens."""
        if not hasattr(self, "kv"):
            return
        size = self.kv.block_size
        for event in self.kv.take_events():
            mirror = self.mirror[getattr(event, "group", 0)]
            if isinstance(event, Stored):
                assert len(event.tokens) == size * len(event.digests)
                at = event.parent or root_digest(*event.scope)
                for i, digest in enumerate(event.digests):
                    tokens = event.tokens[i * size : (i + 1) * size]
                    assert digest not in mirror, "it was stored already"
                    assert digest == block_digest(at, tokens), "parent and tokens make the digest"
                    mirror[digest] = tuple(tokens)
                    at = digest
            elif isinstance(event, Removed):
                for digest in event.digests:
                    del mirror[digest]
        count = sum(map(len, self.mirror))
        if len(self.mirror) == len(self.windows):
            assert count == len(self.kv._index)
        else:
            assert count <= len(self.kv._index) <= self.kv.size

    @invariant()
    def what_is_read_is_there(self) -> None:
        """Every position that the next token of a table sees holds its prefix, in a held block."""
        for table, tokens, computed in self.tables if hasattr(self, "kv") else []:
            size, gone = self.kv.block_size, gone_of(table)
            for group, (lane, window) in enumerate(zip(table.groups(), self.windows, strict=True)):
                low = max(0, computed + 1 - (window or 1 << 20))
                assert gone[group] <= low // size
                for i in range(low // size, -(-computed // size)):
                    seen = tuple(tokens[: min(computed, (i + 1) * size)])
                    of, prefix = self.content[lane[i]]
                    assert (of, prefix[: len(seen)]) == (group, seen)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for table, _, _ in self.tables:
                self.kv.release(table, self.step)
            self.kv.fence(self.step)
            self.kv.check()
            assert self.kv.used_blocks == 0


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, database=None, deadline=None
)

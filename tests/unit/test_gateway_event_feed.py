"""A worker's feed of KV events: faults of the line, and what is claimed of its cache."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.gateway.block_index import BLOCK_BYTES, BlockIndex
from headrace.gateway.event_feed import AUDIT_S, GAP_S, REPLY_S, Feed
from headrace.gateway.prefix_index import root_of, token_chain
from tests.unit.kv_place import held

SIZE, DEPTH = 2, 4
PATHS = list(itertools.product((1, 2), repeat=DEPTH))  # of blocks [n, n]


encode = msgspec.msgpack.encode


class Publisher:
    """A worker's cache and what it says of it. The reference: `leading` is the truth."""

    def __init__(self, kept: int, snapshots: bool) -> None:
        self.snapshots = snapshots
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.clock = itertools.count(1)
        self.runs = 0
        self.restart()

    def restart(self) -> None:
        self.runs += 1
        self.held: dict[int, tuple[int, ...]] = {}  # hash -> path of its blocks
        self.hash_of: dict[tuple[int, ...], int] = {}
        self.kept.clear()
        self.number = 0

    def _hash(self, path: tuple[int, ...]) -> int:
        return self.hash_of.setdefault(path, 1000 * self.runs + len(self.hash_of))

    def batch(self, events: list[Any]) -> tuple[int, bytes]:
        said = (self.number, encode([float(next(self.clock)), events, 0]))
        self.kept.append(said)
        self.number += 1
        return said

    def store(self, path: tuple[int, ...], first: int) -> tuple[int, bytes]:
        """Blocks first.. of `path`, as far as they are not held; like an engine, it may store a
        block whose parent is not in the index."""
        events = []
        for end in range(first + 1, len(path) + 1):
            part = path[:end]
            block = self._hash(part)
            if block not in self.held:
                parent = self._hash(part[:-1]) if len(part) > 1 else None
                tokens = [part[-1]] * SIZE
                events.append(["BlockStored", [block], parent, tokens, SIZE, None, "GPU"])
                self.held[block] = part
        return self.batch(events)

    def remove(self, which: int) -> tuple[int, bytes]:
        block = list(self.held)[which % len(self.held)]
        del self.held[block]
        return self.batch([["BlockRemoved", [block], "GPU"]])

    def clear(self) -> tuple[int, bytes]:
        self.held.clear()
        return self.batch([["AllBlocksCleared"]])

    def answer(self, first: int) -> list[tuple[int, bytes]]:
        if not self.snapshots or first >= self.number or first >= self.kept[0][0]:
            return [said for said in self.kept if said[0] >= first]
        events: list[Any] = [["AllBlocksCleared"]]
        for block, part in self.held.items():
            parent = self._hash(part[:-1]) if len(part) > 1 else None
            events.append(["BlockStored", [block], parent, [part[-1]] * SIZE, SIZE, None, "GPU"])
        newest = msgspec.msgpack.decode(self.kept[-1][1])[0]
        return [(self.number - 1, encode([newest, events, 0]))]

    def leading(self, path: tuple[int, ...]) -> int:
        held = set(self.held.values())
        return next((n for n in range(len(path)) if path[: n + 1] not in held), len(path))


class FeedMachine(RuleBasedStateMachine):
    """A line that drops, doubles and reorders, a worker that restarts, answers that get lost."""

    @initialize(
        kept=st.sampled_from([1, 3, 1000]),
        snapshots=st.booleans(),
        replays=st.sampled_from([True, True, False]),
    )
    def start(self, kept: int, snapshots: bool, replays: bool) -> None:
        self.now = 0.0
        self.worker = Publisher(kept, snapshots)
        self.index = BlockIndex(2**20)
        self.index.add_worker("w")
        self.feed = Feed(self.index, "w", replays=replays, now_s=0.0)
        self.whole = replays and (snapshots or kept == 1000)  # everything can be had
        self.line: list[tuple[int, bytes] | None] = []  # None: it was cut here
        self.answers: deque[tuple[int, bytes] | None] = deque()  # None: the end of one

    @rule(path=st.sampled_from(PATHS), first=st.integers(0, 1), length=st.integers(1, DEPTH))
    def store(self, path: tuple[int, ...], first: int, length: int) -> None:
        self.line.append(self.worker.store(path[:length], min(first, length - 1)))

    @precondition(lambda self: self.worker.held)
    @rule(which=st.integers(0, 99))
    def remove(self, which: int) -> None:
        self.line.append(self.worker.remove(which))

    @rule(often=st.integers(0, 9))
    def clear(self, often: int) -> None:
        if not often:
            self.line.append(self.worker.clear())

    @rule(often=st.integers(0, 5))
    def restart(self, often: int) -> None:
        if not often:
            self.worker.restart()
            self.line.append(None)

    @precondition(lambda self: self.line)
    @rule(fault=st.sampled_from(["", "", "", "drop", "double", "swap", "again"]))
    def deliver(self, fault: str) -> None:
        if self.line[0] is None:
            self.line.pop(0)
            self.feed.doubt()
            return
        if fault == "swap" and len(self.line) > 1 and self.line[1] is not None:
            self.line[:2] = self.line[1::-1]
        said = self.line.pop(0)
        assert said is not None
        if fault == "drop":
            return
        self.feed.live(*said, self.now)
        if fault == "double":
            self.feed.live(*said, self.now)
        if fault == "again" and None not in self.line:
            self.line.append(said)  # much later once more
        self._work()

    @rule(lost=st.sampled_from([False, False, False, True]))
    def ask(self, lost: bool) -> None:
        if self.feed.wants is not None:
            first = self.feed.wants
            self.feed.asked(self.now)
            self.answers.clear()
            if not lost:
                self.answers.extend([*self.worker.answer(first), None])

    @precondition(lambda self: self.answers)
    @rule(count=st.integers(1, 5))
    def hear(self, count: int) -> None:
        for _ in range(min(count, len(self.answers))):
            said = self.answers.popleft()
            if said is None:
                self.feed.reply_end(self.now)
            else:
                self.feed.reply(*said, self.now)
        self._work()

    @rule(passed_s=st.sampled_from([0.1, GAP_S + 0.1, REPLY_S + 0.1, AUDIT_S + 0.1]))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s
        self.feed.tick(self.now)
        self._work()

    @rule()
    def comes_up(self) -> None:
        self.feed.doubt()

    def _work(self) -> None:
        while self.feed.work(self.now):
            pass

    @invariant()
    def sums(self) -> None:
        if hasattr(self, "index"):
            self.index.check()

    def _claims(self) -> list[int]:
        root = root_of("")
        chains = [token_chain([n for n in path for _ in range(SIZE)], root, SIZE) for path in PATHS]
        return [self.index.match(chain, ["w"])[0] for chain in chains]

    def teardown(self) -> None:
        """The line is whole again and some time passes: nothing false is left."""
        if not hasattr(self, "index"):
            return
        while self.line:
            self.deliver("")
        self.line.append(self.worker.store(PATHS[0], 0))  # without answers, the next batch tells
        self.deliver("")
        for _ in range(30):
            self.wait(AUDIT_S + 0.1)
            self.ask(False)
            if self.answers:
                self.hear(10**6)
        self.index.check()
        claims, truth = self._claims(), [self.worker.leading(path) for path in PATHS]
        if self.whole:
            assert self.feed.state == "exact", self.feed.why
        if self.feed.state == "exact":
            assert claims == truth
        assert all(a <= b for a, b in zip(claims, truth, strict=True)), (claims, truth)


FeedMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFeed = FeedMachine.TestCase


def fed(*batches: tuple[int, Any], replays: bool = False) -> tuple[Feed, BlockIndex]:
    index = BlockIndex(2**20)
    index.add_worker("w")
    feed = Feed(index, "w", replays=replays, now_s=0.0)
    for number, told in batches:
        feed.live(number, encode([float(number), told, 0]), 0.0)
        while feed.work(0.0):
            pass
    return feed, index


def block(n: int, parent: int | None) -> list[Any]:
    return ["BlockStored", [n], parent, [n, n], 2, None, "GPU"]


def test_from_the_first_batch_on_it_is_exact_without_questions() -> None:
    feed, index = fed((0, [block(1, None)]), (1, [block(2, 1)]))
    assert (feed.state, held(index, 1, 2, 3)) == ("exact", 2)


def said(feed: Feed) -> str:
    """Its state; a checker of types would think that it cannot change."""
    return feed.state


def test_who_comes_late_and_cannot_ask_is_degraded_until_all_is_cleared() -> None:
    feed, index = fed((7, [block(2, 1)]))
    assert said(feed) == "fallback"
    feed.tick(GAP_S + 1)
    assert not feed.work(GAP_S + 1)
    assert (said(feed), held(index, 1, 2)) == ("degraded", 0)
    feed.live(8, encode([8.0, [block(1, None)], 0]), 3.0)
    assert held(index, 1, 2) == 2, "the block that waited for its parent"
    assert said(feed) == "degraded"
    feed.live(9, encode([9.0, [["AllBlocksCleared"], block(3, None)], 0]), 3.0)
    assert (said(feed), held(index, 1), held(index, 3)) == ("exact", 0, 1)


def test_a_batch_that_cannot_be_read_is_one_that_is_lost() -> None:
    feed, index = fed((0, [block(1, None)]))
    feed.live(1, b"\xc1", 0.0)
    assert (feed.state, held(index, 1), feed.counts["bad"]) == ("degraded", 0, 1)


def test_a_cache_of_another_kind_is_a_fallback() -> None:
    event = {**dict.fromkeys(("block_hashes", "parent_block_hash")), "type": "BlockStored"}
    event |= {"block_hashes": [1], "token_ids": [1], "block_size": 1, "kv_cache_spec_kind": "mamba"}
    feed, _ = fed((0, [event]))
    assert (feed.state, feed.why) == ("fallback", "its cache is of the kind mamba")


def test_the_index_is_bounded_and_full_is_degraded() -> None:
    index = BlockIndex(3 * BLOCK_BYTES)
    index.add_worker("w")
    feed = Feed(index, "w", replays=False, now_s=0.0)
    for n in range(5):
        feed.live(n, encode([float(n), [block(n + 1, n or None)], 0]), 0.0)
    assert (feed.state, index.blocks("w"), held(index, 1, 2, 3, 4)) == ("degraded", 3, 3)
    index.check()


def test_a_late_batch_from_before_a_snapshot_is_no_restart() -> None:
    feed, index = fed(replays=True)
    feed.asked(0.0)
    feed.reply(5, encode([5.0, [["AllBlocksCleared"], block(1, None), block(2, 1)], 0]), 0.0)
    feed.reply_end(0.0)
    assert (said(feed), held(index, 1, 2)) == ("exact", 2)
    feed.live(0, encode([0.5, [block(1, None)], 0]), 0.0)
    assert (said(feed), held(index, 1, 2), feed.wants) == ("degraded", 2, 5)
    feed.asked(0.0)
    feed.reply(5, encode([5.0, [block(2, 1)], 0]), 0.0)
    feed.reply_end(0.0)
    assert (said(feed), held(index, 1, 2), feed.counts["restarts"]) == ("exact", 2, 0)

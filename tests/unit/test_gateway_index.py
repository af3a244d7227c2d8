"""The gateway's prefix index: what it holds, what it forgets, and how much memory that takes."""

from __future__ import annotations

import os
import tracemalloc
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.prefix_index import (
    CHUNK_BYTES,
    ENTRY_BYTES,
    FINE_CHUNKS,
    PrefixIndex,
    prompt_chain,
    root_of,
    text_chain,
    token_chain,
    units_of,
)

NAMES = ("a", "b", "c")


def index(max_entries: int = 1000) -> PrefixIndex:
    made = PrefixIndex(max_entries * ENTRY_BYTES)
    for name in NAMES:
        made.add_worker(name)
    return made


def test_the_longest_held_beginning_counts() -> None:
    one = index()
    one.insert([1, 2, 3], "a")
    one.insert([1, 2], "b")
    one.insert([9, 2, 3], "c")
    assert one.match([1, 2, 3, 4], NAMES) == (3, 2, 0)
    assert one.match([1, 2, 3, 4], ("c", "a")) == (0, 3)
    assert one.match([], NAMES) == (0, 0, 0)
    one.forget("a")
    assert one.match([1, 2, 3], NAMES) == (0, 2, 0)
    one.remove_worker("b")
    one.add_worker("d")
    assert one.match([1, 2, 3], ("a", "d")) == (0, 0)
    one.check()


@given(st.lists(st.integers(0, 70)))
def test_workers_that_come_take_the_lowest_places_that_are_free(steps: list[int]) -> None:
    """Each its own, so that masks stay short however often workers come and go."""
    one, there = PrefixIndex(ENTRY_BYTES), dict[int, int]()
    for worker in steps:
        if worker in there:
            del there[worker]
            one.remove_worker(str(worker))
            continue
        there[worker] = min(set(range(len(there) + 1)) - set(there.values()))
        one.add_worker(str(worker))
    assert one._bits == {str(worker): 1 << place for worker, place in there.items()}


def test_the_end_of_a_prompt_goes_first() -> None:
    one = index()
    one.set_capacity("a", 4)
    one.insert([1, 2, 3], "a")
    one.insert([7, 8], "a")
    assert one.match([1, 2, 3], NAMES) == (2, 0, 0)
    one.set_capacity("a", 2)
    assert one.match([7, 8], NAMES) == (2, 0, 0)


def test_chains_differ_by_model_adapter_and_salt_and_share_beginnings() -> None:
    roots = {
        root_of("m"),
        root_of("m", "x"),
        root_of("m", "", "x"),
        root_of("mx"),
        root_of("", "m"),
    }
    assert len(roots) == 5
    root = root_of("m")
    text = os.urandom(1000)
    whole, cut = text_chain(text, root, 100), text_chain(text[:599], root, 100)
    assert len(whole) == 10
    assert whole[:5] == cut
    assert text_chain(text, root_of("m", salt="s"), 100)[0] != whole[0]
    moved = text_chain(b"x" + text, root, 100)
    assert not set(moved) & set(whole)
    ids = list(range(70))
    assert len(token_chain(ids, root, 16)) == 4
    assert token_chain(ids[:40], root, 16) == token_chain(ids, root, 16)[:2]


def test_long_prompts_have_few_chunks_and_what_they_hold_is_known() -> None:
    text, root = os.urandom(70_000), root_of("m")
    chain = prompt_chain(text, root)
    assert len(chain) == FINE_CHUNKS + (70_000 - 4096) // 1024
    for cut, chunks in ((4096, 16), (5119, 16), (5120, 17), (256, 1), (255, 0)):
        assert prompt_chain(text[:cut], root) == chain[:chunks]
        assert units_of(chunks, FINE_CHUNKS) * CHUNK_BYTES <= cut
    one = PrefixIndex(1000 * ENTRY_BYTES)
    one.add_worker("a", capacity_chunks=100)  # holds 25 600 bytes of it
    one.insert(chain, "a", FINE_CHUNKS)
    one.check()
    (held,) = one.match(chain, ["a"])
    assert units_of(held, FINE_CHUNKS) == 100


class Plain:
    """The same index in the plainest way: a list of chunks a worker."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in NAMES}

    def insert(self, chain: list[int], name: str) -> None:
        for chunk in reversed(chain):
            self.held[name][chunk] = None
            self.held[name].move_to_end(chunk)
        while sum(map(len, self.held.values())) > self.most:
            longest = max(self.held.values(), key=len)
            longest.popitem(last=False)

    def match(self, chain: list[int]) -> tuple[int, ...]:
        def leading(held: OrderedDict[int, None]) -> int:
            return next((n for n, c in enumerate(chain) if c not in held), len(chain))

        return tuple(leading(self.held[name]) for name in NAMES)


chains = st.lists(st.integers(0, 12), max_size=6, unique=True)


@given(st.integers(1, 20), st.lists(st.tuples(chains, st.sampled_from((*NAMES, "forget")))))
def test_it_is_the_plain_index(most: int, steps: list[tuple[list[int], str]]) -> None:
    one, plain = index(most), Plain(most)
    for chain, name in steps:
        if name == "forget":
            one.forget("b")
            plain.held["b"].clear()
        else:
            one.insert(chain, name)
            plain.insert(chain, name)
        one.check()
        assert one.match(chain, NAMES) == plain.match(chain)
        assert one.used_bytes <= most * ENTRY_BYTES


def test_memory_is_flat_and_within_the_budget() -> None:
    most = 4000
    one = PrefixIndex(most * ENTRY_BYTES)
    for name in NAMES:
        one.add_worker(name)

    def fill(prompts: int) -> None:
        for i in range(prompts):
            one.insert(text_chain(os.urandom(5120), root_of("m")), NAMES[i % 3])

    tracemalloc.start()
    try:
        fill(400)
        first = tracemalloc.get_traced_memory()[0]
        fill(1200)
        last = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(one) == most
    assert last <= most * ENTRY_BYTES
    assert last < 1.1 * first

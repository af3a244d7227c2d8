"""The blocks of prompts that steps in flight compute."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.engine.request import Sequence
from headrace.engine.underway import Underway
from headrace.kv import prefix
from headrace.kv.cache import KVCache
from tests.unit.test_queue import sequence

PROMPT = list(range(40))


def alike(kv: KVCache, arrival: int, row: int) -> Sequence:
    made = sequence(arrival)
    made.tokens = [*PROMPT, arrival]
    made.table, made.row = kv.open("", ""), row
    return made


def test_of_several_that_compute_a_block_the_one_ahead_counts() -> None:
    kv = KVCache(40, 4)
    underway, ahead, behind = Underway(kv), alike(kv, 0, 0), alike(kv, 2, 1)
    underway.note(1, ahead, 41)
    underway.note(1, behind, 41)
    assert underway.has_ahead(alike(kv, 1, 2), 8, 4)
    assert not underway.has_ahead(alike(kv, 0, 2), 8, 4), "nobody is ahead of it"


def test_a_step_that_has_finished_is_forgotten() -> None:
    kv = KVCache(40, 4)
    underway, first, waits = Underway(kv), alike(kv, 0, 0), alike(kv, 1, 1)
    underway.note(1, first, 20)
    first.planned = 20
    underway.note(2, first, 21)
    kv.fence(1)
    underway.land()
    assert not underway.has_ahead(waits, 8, 4), "its first blocks are computed; no cache has them"
    kv.fence(2)
    underway.land()
    assert not underway._steps


def test_who_waits_digests_nothing_that_was_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are compared with those of the one ahead instead."""
    kv, made = KVCache(400, 4), list[bytes]()
    ahead, *waiting = [sequence(i) for i in range(11)]
    for one in (ahead, *waiting):
        one.tokens = [i * i % 251 for i in range(800)] + [one.key[-1]]
        one.table = kv.open("", "")
    ahead.row = 0

    def counted(data: bytes, digest_size: int) -> object:
        made.append(data)
        return blake2b(data, digest_size=digest_size)

    monkeypatch.setattr(prefix, "blake2b", counted)
    underway = Underway(kv)
    underway.note(1, ahead, 801)
    assert all(underway.has_ahead(one, 128, 4) for one in waiting)
    assert len(made) == 200 + len(waiting), "a block of each tells whom it may compare with"
    assert all(kv.digests(one.table, one.tokens, 0, 200) == ahead.table.digests for one in waiting)
    assert len(made) == 200 + len(waiting)


@example(
    tokens=[1, 1, 2, 2], lent=[0, 0, 2, 2], shared=[], has=1, lends=2, salt=""
)  # alike only behind where they part
@given(
    tokens=st.lists(st.integers(0, 2), max_size=200),
    lent=st.lists(st.integers(0, 2), max_size=200),
    shared=st.lists(st.integers(0, 2), max_size=150),
    has=st.integers(0, 9),
    lends=st.integers(0, 99),
    salt=st.sampled_from(["", "other"]),
)
def test_what_is_borrowed_is_what_would_be_digested(
    tokens: list[int], lent: list[int], shared: list[int], has: int, lends: int, salt: str
) -> None:
    kv = KVCache(40, 2)
    tokens, lent = shared + tokens, shared + lent
    table, lender, alone = kv.open("", ""), kv.open(salt, ""), kv.open("", "")
    kv.digests(table, tokens, 0, min(has, len(tokens) // 2))
    kv.digests(lender, lent, 0, min(lends, len(lent) // 2))
    before = len(table.digests)
    kv.borrow(table, tokens, lender, lent)
    known = len(table.digests)
    assert table.digests == kv.digests(alone, tokens, 0, known)
    assert known >= before
    if not salt:
        assert known >= min(len(shared) // 2, len(lender.digests))
    else:
        assert known == before

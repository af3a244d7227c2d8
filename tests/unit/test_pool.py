"""BlockPool: order of eviction, references."""

from __future__ import annotations

import pytest

from headrace.kv.pool import BlockPool


def test_hands_out_least_recently_freed_first() -> None:
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    for block in (1, 2, 0):
        pool.drop(block, reusable=True)
    assert [pool.take() for _ in range(3)] == [1, 2, 0]


def test_blocks_without_content_go_first() -> None:
    pool = BlockPool(3)
    for _ in range(3):
        pool.take()
    pool.drop(0, reusable=True)
    pool.drop(1, reusable=False)
    pool.drop(2, reusable=True)
    assert [pool.take() for _ in range(3)] == [1, 0, 2]


def test_a_hit_revives_a_free_block_and_shares_a_held_one() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.drop(block, reusable=True)
    assert pool.free == 2
    pool.hold(block)
    pool.hold(block)
    assert (pool.free, pool.references[block]) == (1, 2)
    pool.drop(block, reusable=True)
    assert pool.free == 1
    pool.drop(block, reusable=True)
    assert pool.free == 2
    pool.check()


def test_dropping_too_often_is_a_bug_of_ours() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0 is dropped more often"):
        pool.drop(0, reusable=True)


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.references[1] = 1
    with pytest.raises(AssertionError, match=r"free list off by \{1\}"):
        pool.check()

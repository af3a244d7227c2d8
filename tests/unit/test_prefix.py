"""PrefixIndex and its hash, which other programs may compute too."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.prefix import PrefixIndex, block_digest, chain, root_digest


def test_the_hash_is_the_documented_one() -> None:
    root = hashlib.blake2b(b"\x01\x00\x00\x00" + b"as", digest_size=16).digest()
    assert root_digest("a", "s") == root
    ids = b"\x01\x00\x00\x00" + b"\x00\x01\x00\x00"
    assert block_digest(root, [1, 256]) == hashlib.blake2b(root + ids, digest_size=16).digest()


def test_adapter_and_salt_cannot_be_mistaken_for_each_other() -> None:
    pairs = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("", "abc"), ("é", "")]
    assert len({root_digest(*pair) for pair in pairs}) == len(pairs)


def test_the_chain_depends_on_all_that_came_before() -> None:
    root = root_digest("", "")
    a, b = block_digest(root, [1, 2]), block_digest(root, [2, 1])
    assert a != b
    assert block_digest(a, [3]) != block_digest(b, [3])


def test_first_writer_keeps_the_entry() -> None:
    index = PrefixIndex()
    index.put(b"d", 1)
    index.put(b"d", 2)
    assert index.get(b"d") == 1
    assert 1 in index
    assert 2 not in index
    index.forget(2)
    assert index.get(b"d") == 1
    index.forget(1)
    assert index.get(b"d") is None
    assert len(index) == 0
    index.check()


def test_one_block_has_one_digest() -> None:
    index = PrefixIndex()
    index.put(b"d", 1)
    with pytest.raises(AssertionError, match="block 1 is published under two digests"):
        index.put(b"e", 1)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_a_chain_is_its_blocks_one_by_one(ids: list[int], size: int) -> None:
    ids = ids[: len(ids) // size * size]
    at, want = root_digest("a", "s"), []
    for start in range(0, len(ids), size):
        at = block_digest(at, ids[start : start + size])
        want.append(at)
    assert chain(root_digest("a", "s"), ids, size) == want

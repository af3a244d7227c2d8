"""Memory of the index of blocks, and blocks that are expected and do not come."""

from __future__ import annotations

import tracemalloc

from headrace.gateway.beliefs import Expected
from headrace.gateway.block_index import BLOCK_BYTES, BlockIndex
from headrace.gateway.kv_wire import Stored


def test_memory_of_blocks_is_within_the_budget() -> None:
    most = 1500
    index = BlockIndex(most * BLOCK_BYTES)
    for name in ("a", "b"):
        index.add_worker(name)
    tracemalloc.start()
    try:
        for i in range(3 * most):
            tokens = b"".join((i * 16 + j).to_bytes(4, "little") for j in range(16))
            one = Stored([2**63 + i], None, tokens, 16, "", "", [])
            index.store("ab"[i % 2], one)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert index.blocks("a") + index.blocks("b") == most
    assert used <= index.used_bytes == most * BLOCK_BYTES


def test_expected_blocks_are_forgotten_in_time() -> None:
    expected = Expected()
    expected.add_worker("w")
    expected.expect("w", [1, 2], 5.0)
    expected.expect("w", [2, 3], 7.0)
    assert expected.match([1, 2, 3], ["w"]) == (3,)
    expected.sweep(6.0)
    assert expected.match([1, 2, 3], ["w"]) == (0,)
    assert expected.match([2, 3], ["w"]) == (2,)
    expected.sweep(7.0)
    assert expected.match([2, 3], ["w"]) == (0,)
    expected.expect("w", [9], 9.0)
    expected.clear("w")
    expected.remove_worker("w")
    expected.sweep(10.0)

"""How much of a prefix can be used again."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from headrace.kv.room import first_read, reusable


def test_a_hole_ends_the_prefix_before_it() -> None:
    def of(held: set[int], end: int, window: int = 8) -> int:
        return reusable(end, [window], 4, lambda _, at: at in held)

    assert of({8, 9}, 10) == 10
    assert of({7, 8}, 10) == 9, "blocks 7 and 8 are the window before block 9"
    assert of({7, 9}, 10) == 0
    assert of({0, 9}, 10) == 1, "nothing lies before the first block"
    assert of({7, 8}, 10, 9) == 0, "a window of 9 tokens reads a third block"
    assert reusable(10, [], 4, lambda _, __: False) == 10


def found(end: int, windows: list[int], held: set[tuple[int, int]]) -> tuple[int, Counter[Any]]:
    """The blocks of the prefix, and how often each was asked for."""
    asked = Counter[Any]()

    def holds(window: int, at: int) -> bool:
        asked[window, at] += 1
        return (window, at) in held

    return reusable(end, windows, 4, holds), asked


def test_the_longest_prefix_at_the_price_of_its_blocks() -> None:
    """Holes in one window after another: each block is asked for once in each."""
    chance = random.Random(3)
    for _ in range(500):
        end, windows = chance.randrange(40), chance.sample(range(1, 60), chance.randrange(4))
        share = chance.choice([0.5, 0.8, 0.95])
        held = {(w, at) for w in windows for at in range(end) if chance.random() < share}
        whole = [
            n
            for n in range(end + 1)
            if all((w, at) in held for w in windows for at in range(first_read(w, 4, n), n))
        ]
        blocks, asked = found(end, windows, held)
        assert blocks == whole[-1]
        assert set(asked.values()) <= {1}

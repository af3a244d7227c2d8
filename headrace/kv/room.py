"""How many blocks of a pool a sequence holds, and how long a sequence a pool holds: arithmetic.

A block of the pool is `block_size` tokens in the layers of one group; a block of a sequence is one
of each group that keeps it. windows: of each group, newest tokens that a query reads; 0 = all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence


def of_group(window: int, block_size: int, blocks: int) -> int:
    """What a sequence of `blocks` blocks holds of one group while it decodes.

    Blocks go back a block at a time, so that is a window and a block's tokens, wherever they begin.
    """
    return min(blocks, (window + block_size - 2) // block_size + 2) if window else blocks


def most_held(windows: Sequence[int], block_size: int, blocks: int) -> int:
    """The same of all groups."""
    return sum(of_group(window, block_size, blocks) for window in windows)


def longest(size: int, held: Callable[[int], int]) -> int:
    """Blocks of the longest sequence that a pool of `size` holds, of those up to `size` long.

    held: what one of so many takes, which never falls.
    """
    return bisect_right(range(1, size + 1), size, key=held)

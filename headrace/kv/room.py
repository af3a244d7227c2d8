"""How many blocks of a pool a sequence holds, how long a sequence a pool holds, and how much of a
prefix can be used again: arithmetic.

A block of the pool is `block_size` tokens in the layers of one group; a block of a sequence is one
of each group that keeps it. windows: of each group, newest tokens that a query reads; 0 = all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence


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


def tokens_kept(size: int, groups: int, block_size: int) -> int:
    """Tokens that a pool of `size` blocks keeps in each of `groups` groups.

    So many tokens of prompts can be hit again: what a prompt writes takes a block in each group,
    and pushes out the oldest. Sequences that run hold less of groups with a window, so more of
    theirs may fit.
    """
    return size // groups * block_size


def first_read(window: int, block_size: int, end: int) -> int:
    """Of a prefix of `end` blocks, the first that its last token, which may have to be computed
    again, or a later one reads."""
    return max(0, end * block_size - window) // block_size if window else 0


def reusable(
    end: int, windows: Iterable[int], block_size: int, holds: Callable[[int, int], bool]
) -> int:
    """Blocks of the longest prefix that can be used again, of `end` that layers without a window
    hold.

    holds(window, i): layers with that window have block i. Each of `windows` wants those of the
    last window before the end. O(end) for each window: no block is asked for twice.
    """
    lows = dict.fromkeys(windows, end)  # window -> blocks from here to the end are there
    settled = False
    while not settled:  # a hole moves the end before it, for all windows
        settled = True
        for window, low in lows.items():
            at, first = min(low, end), first_read(window, block_size, end)
            while at > first and holds(window, at - 1):
                at -= 1
            lows[window] = at
            if at > first:
                end, settled = at - 1, False
    return end

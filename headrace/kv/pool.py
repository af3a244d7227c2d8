"""BlockPool: which KV blocks are held, how often, and which one is handed out next.

Integers only. A block is free (0 references, in the free list) or held (>= 1 reference, not in it).
The free list is ordered: its head is handed out first. Every operation is O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class BlockPool:
    """`size` blocks, numbered from 0. Changes only what each method names."""

    __slots__ = ("_free", "references", "reusable", "size")

    def __init__(self, size: int) -> None:
        assert size > 0, f"a pool of {size} blocks"
        self.size = size
        self.references = [0] * size
        # Block -> whether its content may be hit again.
        self._free: OrderedDict[int, bool] = OrderedDict.fromkeys(range(size), False)
        self.reusable = 0  # free ones whose content may be hit again

    @property
    def free(self) -> int:
        """Blocks with no reference."""
        return len(self._free)

    def reusable_blocks(self) -> Iterator[int]:
        """Free blocks whose content may be hit again. O(free)."""
        return (block for block, reusable in self._free.items() if reusable)

    def take(self) -> int:
        """Hand out the head of the free list with one reference. Needs `free` > 0."""
        block, reusable = self._free.popitem(last=False)
        self.reusable -= reusable
        self.references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference; a free block is taken out of the free list with its content."""
        if self.references[block] == 0:
            self.reusable -= self._free.pop(block)
        self.references[block] += 1

    def drop(self, block: int, *, reusable: bool) -> None:
        """One reference less. The last one frees the block.

        `reusable`: its content may be hit again, so it goes to the end of the free list (least
        recently used is evicted first); without content it goes to the head.
        """
        left = self.references[block] - 1
        assert left >= 0, f"block {block} is dropped more often than it was held"
        self.references[block] = left
        if left == 0:
            self._free[block] = reusable
            self.reusable += reusable
            if not reusable:
                self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """Raise AssertionError unless the free list is exactly the blocks without references."""
        free = {block for block, held in enumerate(self.references) if held == 0}
        assert free == set(self._free), f"free list off by {free ^ set(self._free)}"
        assert min(self.references) >= 0, "a negative reference count"
        assert self.reusable == sum(self._free.values()), "reusable blocks were miscounted"

"""Underway: the blocks of prompts that steps compute which have not finished, for whoever waits.

A request whose prompt begins like one of them finds these blocks in the prefix cache once that step
has finished, and need not compute them as well. Blocks are told apart as in the prefix index, by
the digest of the whole prefix. They are looked up where somebody waits; until then a chunk is one
note, and nothing is hashed before it would be anyway.
"""

from __future__ import annotations

from collections import deque

from headrace.engine.request import NO_ROW, Sequence
from headrace.kv.cache import KVCache


class Step:
    """What one step computes: `chunks` (sequence, first block, end) that are not filed yet, and
    digest -> who computes the block, of several the first in the plan: the one ahead."""

    __slots__ = ("chunks", "number", "owners")

    def __init__(self, number: int) -> None:
        self.number = number
        self.chunks: list[tuple[Sequence, int, int]] = []
        self.owners: dict[bytes, Sequence] = {}

    def file(self, kv: KVCache) -> None:
        """Every chunk is in `owners` afterwards."""
        chunks, self.chunks = self.chunks, []
        for sequence, first, end in chunks:
            for digest in kv.digests(sequence.table, sequence.tokens, first, end):
                self.owners.setdefault(digest, sequence)


class Underway:
    """The steps in flight and the one that is being planned: two at most. Loop thread only."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._steps: deque[Step] = deque()  # oldest first

    def land(self) -> None:
        """Forget steps that have finished."""
        while self._steps and self._steps[0].number <= self._kv.finished_step:
            self._steps.popleft()

    def note(self, step: int, sequence: Sequence, count: int) -> None:
        """`step` computes `count` tokens of the sequence from its `planned` on."""
        size = self._kv.block_size
        first, end = sequence.planned // size, (sequence.planned + count) // size
        if first < end:
            if not self._steps or self._steps[-1].number != step:
                self._steps.append(Step(step))
            self._steps[-1].chunks.append((sequence, first, end))

    def has_ahead(self, sequence: Sequence, least_tokens: int, share: int) -> bool:
        """Whether so many tokens, and one part in `share`, of what the cache does not have of the
        sequence's prompt are computed for sequences ahead of it. O(blocks of its prompt)."""
        if not self._steps:
            return False
        kv, tokens = self._kv, sequence.tokens
        begun = kv.hits(sequence.table, tokens)
        least = max(least_tokens, (len(tokens) - begun * kv.block_size) // share)
        end = begun + kv.blocks_for(least)
        if end > len(tokens) // kv.block_size:
            return False
        # Who computes the block at the end has those before it, or computes them too; the first is
        # looked up for prompts that begin otherwise: of these no more is hashed. Of others most
        # has been, for the one ahead.
        ahead = self._ahead(sequence, begun)
        if ahead is None:
            return False
        kv.borrow(sequence.table, tokens, ahead.table, ahead.tokens)
        return self._ahead(sequence, end - 1) is not None

    def _ahead(self, sequence: Sequence, block: int) -> Sequence | None:
        """Who is ahead of it and computes that block of its prompt."""
        digest = self._kv.digests(sequence.table, sequence.tokens, block, block + 1)[0]
        for step in self._steps:
            if step.chunks:
                step.file(self._kv)
            owner = step.owners.get(digest)
            if owner is not None and owner.row != NO_ROW and owner.key < sequence.key:
                return owner
        return None

"""Which worker holds which beginning of a prompt, as far as routing history tells.

A prompt is a chain of integers: the i-th stands for its first i+1 chunks, so equal integers mean
equal beginnings. `text_chain` makes one of text, for workers whose tokens nobody here knows,
`token_chain` of token ids; a trace may bring its own. For each worker the index keeps what was sent
there, newest first, up to the size of its cache; for all of them up to a budget of bytes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from secrets import token_bytes

ENTRY_BYTES = 256  # of one chunk at one worker, upper bound; tests measure it
CHUNK_BYTES = 256  # of text, about 4 blocks of 16 tokens
FINE_CHUNKS, COARSE = 16, 4  # of a text's chunks, see `prompt_chain`
ALL_FINE = 2**62  # fine chunks of a chain whose chunks are all of one size
_SECRET = token_bytes(16)  # nobody outside can make two prompts meet


@lru_cache(maxsize=4096)
def root_of(model: str, adapter: str = "", salt: str = "") -> int:
    """Where chains of one model, adapter and cache salt begin: no two others share an entry."""
    text = b"".join(b"%d:%b" % (len(p), p) for p in (s.encode() for s in (model, adapter, salt)))
    return int.from_bytes(blake2b(text, digest_size=8, key=_SECRET).digest(), "big")


def text_chain(text: bytes, root: int, chunk_bytes: int = CHUNK_BYTES) -> list[int]:
    """The chain of `text`. A last chunk that is not full is left out. The integers hold in this
    process alone: they are made with Python's keyed hash, which costs a tenth of a digest.
    """
    chain = []
    at = root
    for start in range(0, len(text) - chunk_bytes + 1, chunk_bytes):
        at = hash((at, text[start : start + chunk_bytes]))
        chain.append(at)
    return chain


def prompt_chain(text: bytes, root: int) -> list[int]:
    """The chain of a prompt's text: FINE_CHUNKS chunks, those behind COARSE times as long, so that
    the longest prompts cost a quarter. What is held is known to a chunk, a sixteenth at most of it.
    """
    fine_bytes = FINE_CHUNKS * CHUNK_BYTES
    chain = text_chain(text[:fine_bytes], root)
    if len(text) >= fine_bytes + COARSE * CHUNK_BYTES:
        chain += text_chain(text[fine_bytes:], chain[-1], COARSE * CHUNK_BYTES)
    return chain


def units_of(chunks: int, fine_chunks: int) -> int:
    """The length of so many chunks, in chunks of the first size."""
    return chunks if chunks <= fine_chunks else fine_chunks + COARSE * (chunks - fine_chunks)


def token_chain(ids: Sequence[int], root: int, block_tokens: int) -> list[int]:
    """The chain of the full blocks of `ids`, each of which is below 2**32."""
    return text_chain(array("I", ids).tobytes(), root, 4 * block_tokens)


def mark(masks: dict[int, int], chunk: int, bit: int) -> None:
    """Who has this bit holds the chunk. masks: chunk -> bits of its holders."""
    masks[chunk] = masks.get(chunk, 0) | bit


def unmark(masks: dict[int, int], chunk: int, bit: int) -> None:
    """Who has this bit does not hold the chunk."""
    left = masks.get(chunk, 0) & ~bit
    if left:
        masks[chunk] = left
    else:
        masks.pop(chunk, None)


class Holders:
    """Chunk -> the workers that hold it, named by strings."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._taken = 0  # all of them
        self._masks: dict[int, int] = {}  # chunk -> bits of the workers that hold it

    def _enter(self, name: str) -> None:
        assert name not in self._bits, f"{name} is here already"
        free = ~self._taken & (self._taken + 1)  # the lowest bit that nobody has
        self._bits[name] = free
        self._taken |= free

    def _leave(self, name: str) -> None:
        self._taken ^= self._bits.pop(name)

    def match(self, chain: Sequence[int], names: Sequence[str]) -> tuple[int, ...]:
        """How many leading chunks of `chain` each of `names` holds."""
        if not chain or chain[0] not in self._masks:
            return (0,) * len(names)
        counts = dict.fromkeys(names, 0)
        bits = [(self._bits[name], name) for name in names]
        alive = 0
        for bit, _ in bits:
            alive |= bit
        for n, chunk in enumerate(chain):
            still = alive & self._masks.get(chunk, 0)
            if still != alive:
                for bit, name in bits:
                    if bit & alive & ~still:
                        counts[name] = n
                alive = still
                if not alive:
                    break
        for bit, name in bits:
            if bit & alive:
                counts[name] = len(chain)
        return tuple(counts[name] for name in names)

    def _mark(self, chunk: int, name: str) -> None:
        mark(self._masks, chunk, self._bits[name])

    def _unmark(self, chunk: int, name: str) -> None:
        unmark(self._masks, chunk, self._bits[name])


class PrefixIndex(Holders):
    """Chunk -> the workers that are thought to hold it, as what was sent there says."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: most memory of all entries; at least one."""
        super().__init__()
        assert max_bytes >= ENTRY_BYTES, f"{max_bytes} bytes hold no entry"
        self._max_entries = max_bytes // ENTRY_BYTES
        self._held: dict[str, OrderedDict[int, int]] = {}  # worker -> chunk -> units, oldest first
        self._units: dict[str, int] = {}
        self._capacity: dict[str, int] = {}
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    @property
    def used_bytes(self) -> int:
        """At most: see ENTRY_BYTES."""
        return self._entries * ENTRY_BYTES

    def add_worker(self, name: str, capacity_chunks: int = 0) -> None:
        """From now on `name` may hold chunks, at most `capacity_chunks` of the first size (0 = no
        limit known).
        """
        self._enter(name)
        self._held[name], self._units[name] = OrderedDict(), 0
        self._capacity[name] = capacity_chunks

    def set_capacity(self, name: str, capacity_chunks: int) -> None:
        """The size of a worker's cache is known now."""
        self._capacity[name] = capacity_chunks
        self._shrink(name)

    def full(self, name: str) -> bool:
        """As much went to `name` as its cache holds: what is not here must make room for it."""
        return 0 < self._capacity[name] <= self._units[name] + COARSE

    def remove_worker(self, name: str) -> None:
        """`name` is gone."""
        self.forget(name)
        self._leave(name)
        del self._held[name], self._units[name], self._capacity[name]

    def forget(self, name: str) -> None:
        """All that `name` was thought to hold: it started anew."""
        for chunk in self._held[name]:
            self._unmark(chunk, name)
        self._entries -= len(self._held[name])
        self._held[name].clear()
        self._units[name] = 0

    def insert(self, chain: Sequence[int], name: str, fine_chunks: int = ALL_FINE) -> None:
        """A prompt went to `name`, which will hold it. The end is older than the beginning, as it
        is in the caches of engines: it goes first. Chunks behind `fine_chunks` are coarse.
        """
        held, bit, masks = self._held[name], self._bits[name], self._masks
        before, units, at = len(held), 0, len(chain)
        for chunk in reversed(chain):
            at -= 1
            if chunk in held:
                held.move_to_end(chunk)
            else:
                units += (length := 1 if at < fine_chunks else COARSE)
                held[chunk] = length
                masks[chunk] = masks.get(chunk, 0) | bit
        self._entries += len(held) - before
        self._units[name] += units
        self._shrink(name)
        while self._entries > self._max_entries:
            self._drop_oldest(max(self._held, key=lambda other: len(self._held[other])))

    def _shrink(self, name: str) -> None:
        capacity = self._capacity[name]
        while capacity and self._units[name] > capacity:
            self._drop_oldest(name)

    def _drop_oldest(self, name: str) -> None:
        chunk, units = self._held[name].popitem(last=False)
        self._entries -= 1
        self._units[name] -= units
        self._unmark(chunk, name)

    def check(self) -> None:
        """Raise AssertionError unless both directions and the counts agree."""
        masks: dict[int, int] = {}
        for name, held in self._held.items():
            assert self._units[name] == sum(held.values()), name
            assert not self._capacity[name] or self._units[name] <= self._capacity[name], name
            for chunk in held:
                masks[chunk] = masks.get(chunk, 0) | self._bits[name]
        assert masks == self._masks, "workers' chunks and chunks' workers disagree"
        assert self._entries == sum(map(len, self._held.values())) <= self._max_entries

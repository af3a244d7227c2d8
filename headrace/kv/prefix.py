"""PrefixIndex: from the tokens of a prefix to the block that holds their KV.

The hash is chained, so that one lookup stands for the whole prefix, and it is the same on every
machine and in every run:

    digest of the root  = blake2b-16( u32(len(adapter)) adapter salt )       (UTF-8, u32 = LE)
    digest of block i   = blake2b-16( digest of block i-1, ids of block i as u32 LE )

The root's `person` (a field of blake2b) is the variant of the K and V, for most models "": see
`engine.protocol.Capacity.variant`. Two prefixes with another adapter, another cache salt or
another variant therefore never meet. 16 bytes of a cryptographic hash: a collision is not expected
in the life of any server.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def root_digest(adapter: str, salt: str, variant: str = "") -> bytes:
    """Where the chains of one (adapter, salt, variant) start. `variant`: at most 16 bytes."""
    name = adapter.encode()
    text = struct.pack("<I", len(name)) + name + salt.encode()
    return blake2b(text, digest_size=DIGEST_BYTES, person=variant.encode()).digest()


def block_digest(parent: bytes, ids: Sequence[int]) -> bytes:
    """The digest of the block with token `ids` that follows the block with digest `parent`."""
    return blake2b(parent + struct.pack(f"<{len(ids)}I", *ids), digest_size=DIGEST_BYTES).digest()


def chain(parent: bytes, ids: Sequence[int], block_size: int) -> list[bytes]:
    """The digests of the blocks with token `ids`, all of them full, that follow the block with
    digest `parent`: in half the time that `block_digest` takes for each."""
    raw = struct.pack(f"<{len(ids)}I", *ids)
    width, digests = 4 * block_size, list[bytes]()
    for at in range(0, len(raw), width):
        parent = blake2b(parent + raw[at : at + width], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


class PrefixIndex:
    """Digest <-> block, both ways, one to one."""

    __slots__ = ("_blocks", "_digests")

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def get(self, digest: bytes) -> int | None:
        """The block with this digest."""
        return self._blocks.get(digest)

    def leading(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks with these digests, up to the first that has none."""
        blocks: list[int] = []
        for block in map(self._blocks.get, digests):
            if block is None:
                break
            blocks.append(block)
        return blocks

    def put(self, digest: bytes, block: int) -> bool:
        """Publish a block. The first writer keeps the entry: a duplicate block stays private.

        Returns whether the digest is new.
        """
        if digest in self._blocks:
            return False
        assert block not in self._digests, f"block {block} is published under two digests"
        self._blocks[digest] = block
        self._digests[block] = digest
        return True

    def forget(self, block: int) -> bytes | None:
        """The block's content is about to be overwritten. Returns its digest, if it has one."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._blocks[digest]
        return digest

    def check(self) -> None:
        """Raise AssertionError unless the two directions agree."""
        turned = {block: digest for digest, block in self._blocks.items()}
        assert turned == self._digests, "digest -> block and block -> digest disagree"

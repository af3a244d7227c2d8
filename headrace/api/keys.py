"""API keys: kept as SHA-256 digests, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence

NAME_DIGITS = 16  # of a digest
HASHED = "sha256:"  # a setting may give the digest in place of the key


class Keys:
    """The keys that this server knows; without one, everybody may come in.

    given: keys, or `sha256:` with the 64 hexadecimal digits of a key's digest. admins: more of
    them, whose owners may see what the others ask.
    """

    def __init__(self, given: Iterable[str], admins: Iterable[str] = ()) -> None:
        assert not isinstance(given, str), "keys, not the characters of one"
        self._admins = [_digest_of(key) for key in admins]
        self._digests = [*(_digest_of(key) for key in given), *self._admins]

    def admit(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the headers of a request hold a known key.

        `Authorization: Bearer KEY` is OpenAI's way, `x-api-key: KEY` Anthropic's.
        """
        return not self._digests or _match(headers, self._digests)

    def is_admin(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the headers hold the key of an admin; without any keys everybody is one."""
        return not self._digests or _match(headers, self._admins)

    def name(self, headers: Mapping[bytes, bytes]) -> str:
        """What the key of an admitted request is called in logs: the beginning of its digest."""
        known = (digest for digest in _shown(headers) if digest in self._digests)
        return next((HASHED + digest.hex()[:NAME_DIGITS] for digest in known), "")


def _match(headers: Mapping[bytes, bytes], digests: Sequence[bytes]) -> bool:
    known = False
    for digest in _shown(headers):
        for other in digests:  # all of them: time says nothing of which one it was
            known |= hmac.compare_digest(digest, other)
    return known


def _shown(headers: Mapping[bytes, bytes]) -> list[bytes]:
    """The digests of the keys that a request shows."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    shown = [key.strip()] if scheme.lower() == b"bearer" else []
    if b"x-api-key" in headers:
        shown.append(headers[b"x-api-key"].strip())
    return [hashlib.sha256(one).digest() for one in shown]


def _digest_of(key: str) -> bytes:
    if key.startswith(HASHED):
        return bytes.fromhex(key.removeprefix(HASHED))
    return hashlib.sha256(key.encode()).digest()

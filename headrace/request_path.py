"""The path that a request asks for, in one spelling: the server and the gateway match this one.

Two paths that mean the same are the same text here (RFC 3986, 6.2.2), so nothing that goes by the
route (keys, limits, seats, counts) can be passed by another spelling of it. `%2F` is no `/`: it
belongs to the name that holds it, and whoever reads that name decodes it, once.
"""

from __future__ import annotations

import re
import string

import httptools

from headrace.errors import InvalidRequest

_UNRESERVED = frozenset((string.ascii_letters + string.digits + "-._~").encode())
_ENCODED = re.compile(rb"%([0-9A-Fa-f]{2})?")


def one_spelling(path: bytes) -> str:
    """`path` as it came, without its query: what needs no percent-encoding has none, and other
    encodings have upper case. A `%` that encodes nothing stands for itself, as `%25` does: whoever
    makes one spelling of the result gets the same."""
    plain = _ENCODED.sub(_plain, path) if b"%" in path else path
    return plain.decode("latin-1")


def _plain(encoded: re.Match[bytes]) -> bytes:
    if encoded[1] is None:
        return b"%25"
    byte = int(encoded[1], 16)
    return bytes((byte,)) if byte in _UNRESERVED else encoded[0].upper()


def parts_of(target: bytes) -> tuple[str, bytes]:
    """The path, see `one_spelling`, and the query of a request's target: of `/PATH?QUERY`, or of
    `http://HOST/PATH?QUERY`, which clients send to a proxy, where no path is `/`. Raises
    InvalidRequest."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        raise InvalidRequest("the request's target is no path") from None
    return one_spelling(url.path or b"/"), url.query or b""


def target_of(path: str, query: bytes) -> bytes:
    """`parts_of`, put together again: `/PATH?QUERY`."""
    return path.encode("latin-1") + (b"?" + query if query else b"")

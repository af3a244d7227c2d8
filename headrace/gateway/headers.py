"""Which headers go on to a worker, and which of a worker's come back."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import string

from headrace import homes
from headrace.gateway.connection import Request
from headrace.gateway.upstream import Headers

NOT_SENT_ON = frozenset(
    b"host connection keep-alive proxy-authorization proxy-authenticate proxy-connection te "
    b"trailer transfer-encoding upgrade content-length expect accept-encoding x-request-id".split()
) | {homes.HEADER.encode()}
WITH_KEYS = NOT_SENT_ON | {b"authorization", b"x-api-key"}
NOT_SENT_BACK = frozenset(
    b"connection keep-alive transfer-encoding content-length x-request-id trailer "
    b"x-accel-buffering".split()
)
LIMITS = b"x-ratelimit-"
NOT_BESIDE_OURS = NOT_SENT_BACK | {
    LIMITS + what + of
    for what in (b"limit", b"remaining", b"reset")
    for of in (b"-requests", b"-tokens")
}
MAX_ID = 128
_HOME = homes.HEADER.encode()
_ONE = secrets.token_hex(10)  # begins the ids that this process makes
_COUNT = itertools.count()
_FIT = frozenset((string.ascii_letters + string.digits + "-_.:").encode())


def mark_of(folder: str = "") -> bytes:
    """How a gateway names itself in `Via` (RFC 9110, 7.6.3). folder: of its processes, which have
    one name; "" = it is one process."""
    own = hashlib.sha256(folder.encode()).hexdigest()[:20] if folder else secrets.token_hex(10)
    return b"headrace-" + own.encode()


def came_back(request: Request, mark: bytes) -> bool:
    """Whether the gateway of that name has sent the request on before."""
    if b"via" not in request.known:
        return False
    return any(name == b"via" and mark in value for name, value in request.headers)


def request_head(
    request: Request,
    host: bytes,
    id_: bytes,
    body_bytes: int,
    api_key: bytes,
    mark: bytes,
    tag: bytes,
    *,
    keyed: bool,
) -> bytes:
    """The head of what a worker gets. mark: our name in `Via`. tag: the worker's own, for the ids
    that it makes. keyed: the client's key is ours, so it is not sent on."""
    drop = WITH_KEYS if api_key or keyed else NOT_SENT_ON
    lines = [b"%b %b HTTP/1.1\r\nhost: %b" % (request.method, request.target, host)]
    lines += [b"%b: %b" % pair for pair in request.headers if pair[0] not in drop]
    if api_key:
        lines.append(b"authorization: Bearer " + api_key)
    lines.append(b"via: 1.1 %b\r\n%b: %b\r\nx-request-id: %b" % (mark, _HOME, tag, id_))
    lines.append(b"content-length: %d\r\n\r\n" % body_bytes)
    return b"\r\n".join(lines)


def sent_back(headers: Headers, *, limited: bool) -> Headers:
    """A worker's headers that the client gets. limited: ours say what is left of limits."""
    drop = NOT_BESIDE_OURS if limited else NOT_SENT_BACK
    return [pair for pair in headers if pair[0] not in drop]


def request_id(request: Request) -> str:
    """The client's own, if it is fit for a header and a path; else a new one."""
    given = request.known.get(b"x-request-id", b"")
    if given and len(given) <= MAX_ID and _FIT.issuperset(given):
        return given.decode()
    return f"{_ONE}{next(_COUNT):012x}"

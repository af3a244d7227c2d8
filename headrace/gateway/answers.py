"""Answers that the gateway itself gives, and how HTTP/1.1 is written."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from headrace.error_bodies import ANTHROPIC, anthropic_body, openai_body
from headrace.errors import Busy, HeadraceError
from headrace.gateway.upstream import Headers

RESPONSES = "/v1/responses"
LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
STATUS_OF = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "overloaded_error": 503,
    "timeout_error": 504,
}


def headers_of(error: HeadraceError) -> Headers:
    """Retry-After, where trying again may help."""
    if isinstance(error, Busy) and error.retry_after_s:
        return [(b"retry-after", b"%d" % error.retry_after_s)]
    return []


def event_of(error: HeadraceError, path: str) -> bytes:
    """The error as the last event of a stream that has begun. No end is invented behind it."""
    if path.startswith(ANTHROPIC):
        return b"event: error\ndata: " + msgspec.json.encode(anthropic_body(error)) + b"\n\n"
    if path.startswith(RESPONSES):
        said = {**openai_body(error)["error"], "type": "error"}
        return b"event: error\ndata: " + msgspec.json.encode(said) + b"\n\n"
    return b"data: " + msgspec.json.encode(openai_body(error)) + b"\n\n"


def status_of(error: dict[str, object]) -> int:
    """The HTTP status that an error in a worker's stream would have had before it."""
    code = error.get("code")
    if isinstance(code, int) and 400 <= code <= 599:
        return code
    return STATUS_OF.get(str(error.get("type")), 500)


def head(status: int, headers: Headers, *written: bytes) -> bytes:
    """Status line and headers, up to the blank line. written: more of them, as they are sent."""
    line = LINES.get(status) or f"HTTP/1.1 {status} \r\n".encode()
    return b"".join([line, *[b"%b: %b\r\n" % pair for pair in headers], *written, b"\r\n"])

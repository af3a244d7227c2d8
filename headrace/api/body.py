"""Read and decode a request body: bounded in bytes, JSON only, an object."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from headrace.api.errors import ClientGone
from headrace.errors import InvalidRequest, TooLarge, WrongMediaType

_LOOKED_AT_BYTES = 65_536  # of a body that is not JSON, in search of a bad number


async def read_body(request: Request, limit_bytes: int) -> tuple[dict[str, Any], int]:
    """The JSON object in the body, and the body's bytes: a bound of all work that it can ask for.

    Raises WrongMediaType, TooLarge or InvalidRequest.
    """
    media = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise WrongMediaType(f"send application/json, not {media!r}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise WrongMediaType("send the body without a content-encoding")
    too_large = TooLarge(f"the body is over the limit of {limit_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit_bytes:
                raise too_large
    except ClientDisconnect:
        raise ClientGone("the client left while it sent the body") from None
    return decode(bytes(body)), len(body)


def decode(body: bytes) -> dict[str, Any]:
    """JSON bytes to an object. Raises InvalidRequest; NaN and 1e999 are not JSON numbers."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("the body nests too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        found = _absurd(body)
        if found is None:
            raise InvalidRequest(f"the body is not JSON: {error}") from None
        field, fault = found
        raise InvalidRequest(f"{field}: {fault}", param=field) from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _absurd(body: bytes) -> tuple[str, str] | None:
    """The member that holds what only Python reads, and what that is, if that is the fault: a
    number that is NaN or infinite, or half of a surrogate pair."""
    if len(body) > _LOOKED_AT_BYTES:
        return None  # a kindness that may not hold up others
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    for name, member in value.items():
        try:
            name.encode()
            json.dumps(member, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return name.encode(errors="replace").decode(), "half of a surrogate pair is no text"
        try:
            json.dumps(member, allow_nan=False)
        except ValueError:
            return name, "a number is NaN or out of range"
    return None

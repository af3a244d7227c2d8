"""Read and decode a request body: bounded in bytes, JSON only, an object."""

from __future__ import annotations

from typing import Any

from starlette.requests import ClientDisconnect, Request

from headrace.api.errors import ClientGone
from headrace.errors import InvalidRequest, TooLarge, WrongMediaType
from headrace.foreign_json import Malformed, read_json, refusal


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
        value = read_json(body, object)
    except Malformed as error:
        raise refusal(body, error) from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value

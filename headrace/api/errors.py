"""Where an exception becomes an HTTP response, or an SSE event once a stream began."""

from __future__ import annotations

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headrace.error_bodies import body_of, openai_body
from headrace.errors import (
    Busy,
    HeadraceError,
    InvalidRequest,
    NotFound,
    TooLarge,
    Unauthorized,
    WrongMethod,
)

log = logging.getLogger("headrace.api")

CLIENT_GONE = 499  # for the log and metrics; nobody is there to read it


class ClientGone(HeadraceError):
    """The client closed the connection: there is nobody to answer."""

    status = CLIENT_GONE
    code = "client_gone"


def encoded(error: HeadraceError, scope: Scope | None = None) -> bytes:
    """The body's bytes, in the shape of the protocol that `scope` speaks."""
    if scope is None:
        return msgspec.json.encode(openai_body(error))
    exchange = scope.get("headrace.exchange")
    return msgspec.json.encode(body_of(error, scope["path"], exchange and exchange.request_id))


def event_of(error: HeadraceError) -> bytes:
    """The SSE event that ends a stream early. No [DONE] follows: that means complete."""
    return b"data: " + encoded(error) + b"\n\n"


def response_of(error: HeadraceError, scope: Scope) -> Response:
    """The response for an error before the first byte, to the request of `scope`."""
    headers = {}
    if isinstance(error, Busy):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, TooLarge):  # the rest of the body is not read
        headers["connection"] = "close"
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    content = encoded(error, scope)
    return Response(content, error.status, headers, media_type="application/json")


def as_ours(error: Exception) -> HeadraceError:
    """Any exception as one of the tree; what is not ours says nothing of its inside."""
    if isinstance(error, HeadraceError):
        return error
    if isinstance(error, HTTPException):  # the router's own
        if error.status_code == 405:
            return WrongMethod("this route does not take this HTTP method")
        return InvalidRequest(str(error.detail))
    return HeadraceError("internal error; the server's log has the details")


def _no_route(request: Request) -> NotFound:
    """Names the route that a client with a wrong base URL meant, if there is one."""
    path = request.url.path
    known = {str(getattr(route, "path", "")) for route in request.app.routes}
    meant = {"/v1" + path, path.removeprefix("/v1")} & known
    if meant:
        return NotFound(f"there is no such route: is {min(meant)} meant?", code="route_not_found")
    return NotFound("there is no such route; /openapi.json lists them", code="route_not_found")


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for every exception."""
    ours = as_ours(error)
    if ours.status >= 500 and ours is not error:
        log.error("unexpected error in %s", request.url.path, exc_info=error)
    if isinstance(error, HTTPException) and error.status_code == 404:
        ours = _no_route(request)
    response = response_of(ours, request.scope)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})  # a 405 names the methods in `allow`
    return response

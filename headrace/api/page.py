"""GET /ui: the live page. Its files are those of headrace/ui as they are; nothing is built.

The page itself holds no data, so a browser may fetch it without a key and ask for one. What it
shows comes from /ui/api, which `guarded` keeps to those who may see the requests of others: with
API keys whoever has one (the edge has looked by then), without keys programs of this machine alone.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.api.service import service_of
from headrace.web_page import Sent, check_visitor, document, file_of

PATH = "/ui"
DATA = "/ui/api/"  # the only paths of the page that show anything of requests
Endpoint = Callable[[Request], Awaitable[Response]]


def is_data(path: str) -> bool:
    """Whether a path of the page shows something of requests."""
    return path.startswith(DATA)


def is_page(path: str) -> bool:
    """Whether a path is the page's, its data included."""
    return path == PATH or path.startswith(PATH + "/")


def guarded(endpoint: Endpoint) -> Endpoint:
    """An endpoint of the page, behind `check_visitor`."""

    @functools.wraps(endpoint)
    async def checked(request: Request) -> Response:
        settings = service_of(request).settings
        keyed = bool(settings.api_key or settings.admin_key)
        check_visitor(settings.host, keyed, dict(request.scope["headers"]), "--api-key")
        return await endpoint(request)

    return checked


async def index(request: Request) -> Response:
    """The live page."""
    return _response(document("index.html", request.headers.get("if-none-match", "")))


async def file(request: Request) -> Response:
    """A file of the live page, of the version that its address names."""
    return _response(file_of(request.path_params["version"], request.path_params["path"]))


async def slash(_request: Request) -> Response:
    """From /ui/ to /ui: what the page names is relative to that."""
    return Response(status_code=308, headers={"location": "../ui"})


def _response(sent: Sent) -> Response:
    return Response(sent.content, sent.status, sent.headers)


ROUTES = (
    Route(PATH, guarded(index), include_in_schema=False),
    Route(PATH + "/", guarded(slash), include_in_schema=False),
    Route(PATH + "/files/{version}/{path:path}", guarded(file), include_in_schema=False),
)

"""GET /ui: the live page. Its files are those of headrace/ui as they are; nothing is built.

The page itself holds no data, so a browser may fetch it without a key and ask for one. What it
shows comes from /ui/api, which `guarded` keeps to those who may see the requests of others: with
API keys whoever has one (the edge has looked by then), without keys programs of this machine alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.api.chat_socket import same_origin
from headrace.api.service import service_of
from headrace.config import Settings, is_loopback
from headrace.errors import Forbidden, NotFound

PATH = "/ui"
DATA = "/ui/api/"  # the only paths of the page that show anything of requests
FOLDER = Path(__file__).parents[1] / "ui"
VERSION = "{{version}}"  # in index.html: stands for a digest of all files
VERSION_DIGITS = 16
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
SAFETY = {
    # No script but ours, none written into the document, no text parsed as markup by any script.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
FOREVER = "public, max-age=31536000, immutable"  # its path changes when a file does
Endpoint = Callable[[Request], Awaitable[Response]]


class File(msgspec.Struct, frozen=True):
    """One file of the page."""

    content: bytes
    media_type: str


@functools.cache
def load_files() -> tuple[str, dict[str, File]]:
    """The version of the page (a digest of every file) and path under headrace/ui -> file."""
    files = {
        str(path.relative_to(FOLDER)): File(path.read_bytes(), TYPES[path.suffix])
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file()
    }
    digest = hashlib.sha256()
    for name, file in files.items():
        digest.update(name.encode() + b"\0" + file.content + b"\0")
    return digest.hexdigest()[:VERSION_DIGITS], files


def is_data(path: str) -> bool:
    """Whether a path of the page shows something of requests."""
    return path.startswith(DATA)


def is_page(path: str) -> bool:
    """Whether a path is the page's, its data included."""
    return path == PATH or path.startswith(PATH + "/")


def check_visitor(settings: Settings, headers: Mapping[bytes, bytes]) -> None:
    """Raises Forbidden where the page would show requests to whoever can reach the port.

    Without keys only names of this machine are taken, else a page of another site could have its
    own name lead here; and no page of another origin, not even one that --cors-origin lets chat.
    """
    if settings.api_key or settings.admin_key:
        return
    if not is_loopback(settings.host):
        raise Forbidden(
            "the live page shows what others ask: set --api-key, or listen on a loopback address"
        )
    if not is_loopback(_name_of(headers.get(b"host", b"").decode("latin-1"))):
        raise Forbidden("without --api-key the live page is reached as localhost or 127.0.0.1")
    if not same_origin(headers) or _drawn_in(headers):
        raise Forbidden("a page of another origin may not see the requests of this server")


def guarded(endpoint: Endpoint) -> Endpoint:
    """An endpoint of the page, behind `check_visitor`."""

    @functools.wraps(endpoint)
    async def checked(request: Request) -> Response:
        check_visitor(service_of(request).settings, dict(request.scope["headers"]))
        return await endpoint(request)

    return checked


async def index(request: Request) -> Response:
    """The live page."""
    version, files = load_files()
    etag = f'"{version}"'
    headers = {**SAFETY, "etag": etag, "cache-control": "no-cache"}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = files["index.html"].content.replace(VERSION.encode(), version.encode())
    return Response(content, headers=headers, media_type="text/html")


async def file(request: Request) -> Response:
    """A file of the live page, of the version that its address names."""
    version, files = load_files()
    found = files.get(request.path_params["path"])
    if found is None or request.path_params["version"] != version:
        raise NotFound("no such file of the page", code="route_not_found")
    headers = {**SAFETY, "etag": f'"{version}"', "cache-control": FOREVER}
    return Response(found.content, headers=headers, media_type=found.media_type)


async def slash(_request: Request) -> Response:
    """From /ui/ to /ui: what the page names is relative to that."""
    return Response(status_code=308, headers={"location": "../ui"})


def _drawn_in(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of another site loads this as a part of itself, a picture or a frame: such
    requests name no origin. One that leads here by a link does not."""
    foreign = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
    return foreign and headers.get(b"sec-fetch-dest") != b"document"


def _name_of(host: str) -> str:
    """The name in a Host header: `localhost:8000`, `[::1]:8000`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


ROUTES = (
    Route(PATH, guarded(index), include_in_schema=False),
    Route(PATH + "/", guarded(slash), include_in_schema=False),
    Route(PATH + "/files/{version}/{path:path}", guarded(file), include_in_schema=False),
)

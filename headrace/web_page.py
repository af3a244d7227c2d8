"""The web pages of headrace/ui as a server gives them: their files, and who may have them.

The server and the gateway each have a page; they share its modules and these rules. Nothing is
built. A page itself holds no data; what it shows comes from paths that ask for a key where keys
are set.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from headrace.config import is_loopback
from headrace.errors import Forbidden, NotFound

FOLDER = Path(__file__).parent / "ui"
VERSION = "{{version}}"  # in a document: stands for a digest of all files
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


class File(msgspec.Struct, frozen=True):
    """One file of the pages."""

    content: bytes
    media_type: str


class Sent(msgspec.Struct, frozen=True):
    """An answer, however a server writes it."""

    status: int
    headers: dict[str, str]
    content: bytes = b""


@functools.cache
def load_files() -> tuple[str, dict[str, File]]:
    """The version of the pages (a digest of every file) and path under headrace/ui -> file."""
    files = {
        str(path.relative_to(FOLDER)): File(path.read_bytes(), TYPES[path.suffix])
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file()
    }
    digest = hashlib.sha256()
    for name, file in files.items():
        digest.update(name.encode() + b"\0" + file.content + b"\0")
    return digest.hexdigest()[:VERSION_DIGITS], files


def document(name: str, if_none_match: str = "") -> Sent:
    """A page, `name` under headrace/ui; 304 for who has it."""
    version, files = load_files()
    etag = f'"{version}"'
    headers = {**SAFETY, "etag": etag, "cache-control": "no-cache"}
    if etag in if_none_match:
        return Sent(304, headers)
    file = files[name]
    kind = {"content-type": f"{file.media_type}; charset=utf-8"}
    return Sent(200, headers | kind, file.content.replace(VERSION.encode(), version.encode()))


def file_of(version: str, path: str) -> Sent:
    """A file of the version that its address names. Raises NotFound."""
    now, files = load_files()
    found = files.get(path)
    if found is None or version != now:
        raise NotFound("no such file of the page", code="route_not_found")
    kind = found.media_type + ("; charset=utf-8" if found.media_type.startswith("text/") else "")
    headers = {**SAFETY, "etag": f'"{now}"', "cache-control": FOREVER, "content-type": kind}
    return Sent(200, headers, found.content)


def check_visitor(host: str, keyed: bool, headers: Mapping[bytes, bytes], key: str) -> None:
    """Raises Forbidden where a page would show requests to whoever can reach the port.

    host: what the server listens on. keyed: it asks for keys, which then decide. key: what the
    operator sets to have them. Without keys only names of this machine are taken, else a page of
    another site could have its own name lead here; and no page of another origin.
    """
    if keyed:
        return
    if not is_loopback(host):
        raise Forbidden(f"the page shows what others ask: set {key}, or listen on loopback")
    if not is_loopback(_name_of(headers.get(b"host", b"").decode("latin-1"))):
        raise Forbidden(f"without {key} the page is reached as localhost or 127.0.0.1")
    if not same_origin(headers) or _drawn_in(headers):
        raise Forbidden("a page of another origin may not see the requests of this server")


def same_origin(headers: Mapping[bytes, bytes], allowed: Collection[str] = ()) -> bool:
    """Whether what a browser asks comes from a page of this server, or of an allowed origin.
    Programs name no origin.
    """
    origin = headers.get(b"origin")
    if origin is None or "*" in allowed or origin.decode("latin-1") in allowed:
        return True
    return origin.partition(b"://")[2] == headers.get(b"host", b"")


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

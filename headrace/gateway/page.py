"""GET /gateway/ui: the fleet page. Its files are those of headrace/ui, shared with the server's.

The page holds no data, so a browser gets it without a key and asks for one. What it shows are the
routes of `DATA`, which need an operator's key where there are keys; without keys they are for
programs of this machine alone.
"""

from __future__ import annotations

from headrace.config import is_loopback
from headrace.gateway.connection import Request
from headrace.gateway.siblings import Answering
from headrace.web_page import Sent, check_visitor, document, file_of

PATH = "/gateway/ui"
FILES = PATH + "/files/"
DOCUMENT = "gateway.html"
# What the page alone shows. /gateway/workers and /gateway/decisions/ID are older than it and need
# no name of this machine.
DATA = frozenset(
    f"/gateway/{name}" for name in ("decisions", "lint", "predictions", "queue", "tenants")
)
KEYS = "[[keys]]"  # how an operator gets them


def is_page(path: str) -> bool:
    """Whether a path is the page's own: no key is asked for there."""
    return path == PATH or path.startswith(PATH + "/")


def address(url: str, host: str, *, shown: bool, keyed: bool) -> str:
    """Where a browser finds the page of the gateway at `url`; "" = it shows none."""
    return url + PATH if shown and (keyed or is_loopback(host)) else ""


def check(host: str, keyed: bool, request: Request) -> None:
    """Raises Forbidden where the page or its data would go to whoever can reach the port."""
    check_visitor(host, keyed, request.known, KEYS)


def answer(client: Answering, request: Request) -> None:
    """The page or a file of it. Raises NotFound."""
    path = request.path
    if path == PATH:
        sent = document(DOCUMENT)
    elif path == PATH + "/":
        sent = Sent(308, {"location": "../ui"})  # what the page names is relative to that
    else:
        version, _, name = path.removeprefix(FILES).partition("/")
        sent = file_of(version, name)
    headers = [(name.encode(), value.encode()) for name, value in sent.headers.items()]
    client.answer(sent.status, headers, sent.content)

"""A Hugging Face Hub of one repository on localhost, with faults to order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`files` by name; `asked` lists (method, path) of every request.

    cut: file -> how many of its next downloads end halfway through what is left.
    broken: files whose download answers 500.
    stalled: files whose download stops halfway and keeps the connection open.
    """

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo, self.files = repo, files
        self.asked: list[tuple[str, str]] = []
        self.ranges: list[str] = []
        self.cut: dict[str, int] = {}
        self.broken: set[str] = set()
        self.stalled: set[str] = set()
        self.gated = False
        self.closing = threading.Event()
        self.url = ""

    def downloads(self) -> list[str]:
        """Names of the files that were asked for with GET, in order."""
        mark = f"/{self.repo}/resolve/{COMMIT}/"
        return [p.removeprefix(mark) for m, p in self.asked if m == "GET" and p.startswith(mark)]


@contextlib.contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """`hub.url` answers inside the block."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path))
        api, mark = f"/api/models/{hub.repo}", f"/{hub.repo}/resolve/{COMMIT}/"
        if hub.gated and hub.repo in path:
            return self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        if path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in hub.files]
            info = {"id": hub.repo, "sha": COMMIT, "siblings": siblings}
            return self._send(200, json.dumps(info).encode(), body)
        if path.startswith(f"{api}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in hub.files.items()
            ]
            return self._send(200, json.dumps(tree).encode(), body)
        name = path.removeprefix(mark)
        if path.startswith(mark) and name in hub.files:
            return self._file(name, hub.files[name], body)
        code = "EntryNotFound" if path.startswith(mark) else "RepoNotFound"
        return self._send(404, b"{}", body, {"X-Error-Code": code})

    def _send(
        self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _file(self, name: str, data: bytes, body: bool) -> None:
        hub = self.hub
        if body and name in hub.broken:
            return self._send(500, b"{}", body)
        start, wanted = 0, self.headers.get("Range")
        if wanted:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            if body:
                hub.ranges.append(wanted)
        rest = data[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(rest)))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return None
        faulty = name in hub.stalled or hub.cut.get(name, 0) > 0
        self.wfile.write(rest[: len(rest) // 2] if faulty else rest)
        self.wfile.flush()
        if faulty:
            while name in hub.stalled and not hub.closing.wait(0.05):
                time.sleep(0)
            hub.cut[name] = hub.cut.get(name, 0) - 1
            self.close_connection = True
        return None


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()

"""A server as `headrace chat` sees it: answers over HTTP, piece by piece. Standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Generator, Iterator
from typing import Any

from headrace.bench.sse import EventReader
from headrace.errors import EngineDead, HeadraceError, InvalidRequest, by_code

TIMEOUT_S = 120.0  # of silence on the socket; servers send keep-alive comments far more often


class Remote:
    """One server and one model of it. Raises HeadraceError with words for a person."""

    def __init__(self, url: str, model: str = "", api_key: str = "") -> None:
        """`model` empty: the first of the server's list."""
        parts = urllib.parse.urlsplit(url if "//" in url else "//" + url, "http")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{url!r} is no http(s) address", param="url")
        self._parts, self._api_key = parts, api_key
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        names = [str(card["id"]) for card in self._get("/v1/models").get("data", [])]
        if not names:
            raise InvalidRequest(f"{self._parts.netloc} serves no model", param="model")
        return names[0]

    def _connect(self) -> http.client.HTTPConnection:
        https = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        assert self._parts.hostname is not None, "checked when the address was read"
        return kind(self._parts.hostname, self._parts.port, timeout=TIMEOUT_S)

    def _ask(
        self, to: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            to.request(method, self._base + path, body, headers)
            response = to.getresponse()
            if response.status == 200:
                return response
            raise _refusal(response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise EngineDead(f"{self._parts.netloc}: {error or type(error).__name__}") from None

    def _get(self, path: str) -> dict[str, Any]:
        connection = self._connect()
        try:
            found: dict[str, Any] = json.loads(self._ask(connection, "GET", path).read())
            return found
        except ValueError:
            raise EngineDead(f"{self._parts.netloc}{path} does not answer in JSON") from None
        finally:
            connection.close()

    def stream(self, messages: list[dict[str, str]], **fields: Any) -> Generator[str, None, None]:
        """Pieces of the answer's text. Closing the iterator closes the connection: an abort.

        Raises HeadraceError: refused, cut, or an error event in the stream.
        """
        body = {"model": self.model, "messages": messages, "stream": True, **fields}
        connection, events = self._connect(), EventReader()
        try:
            path = "/v1/chat/completions"
            response = self._ask(connection, "POST", path, json.dumps(body).encode())
            while data := response.read1(65536):
                for payload in events.feed(data):
                    if payload == b"[DONE]":
                        return
                    yield from _pieces(json.loads(payload))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineDead(f"{self._parts.netloc}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        raise EngineDead("the stream ended early")


def _pieces(chunk: dict[str, Any]) -> Iterator[str]:
    if chunk.get("error"):
        raise _worded(chunk["error"], "the server reported an error")
    for choice in chunk.get("choices", []):
        if text := (choice.get("delta") or {}).get("content"):
            yield text


def _refusal(status: int, body: bytes) -> HeadraceError:
    try:
        error = json.loads(body).get("error")
    except (ValueError, AttributeError):
        error = None
    return _worded(error, f"HTTP {status}")


def _worded(error: Any, otherwise: str) -> HeadraceError:
    if not isinstance(error, dict):
        return EngineDead(str(error or otherwise))
    return by_code(str(error.get("code")), str(error.get("message") or otherwise))

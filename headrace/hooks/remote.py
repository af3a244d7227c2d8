"""A service that a hook asks over HTTP: JSON out, JSON back, within a time."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from headrace.errors import ConfigError, HookUnavailable

THREADS = 8  # requests at once; more wait, within their time
MAX_ANSWER_BYTES = 2**22
TIMEOUT_S = 5.0
OWN_OPTIONS = frozenset({"timeout_s", "key_env"})


class Remote:
    """`URL#option=value&option=value`: what stands behind `#` is for headrace and not sent.

    timeout_s: for all of it, the wait for a thread included. key_env: the environment variable
    that holds the API key. The options of the hook are in `options`.

    Raises ConfigError for a URL or an option that cannot be.
    """

    def __init__(self, text: str, options: Collection[str] = ()) -> None:
        self._url = urlsplit(text)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ConfigError(f"{text}: a URL beginning with http:// or https://", param="hook")
        given = dict(parse_qsl(self._url.fragment, keep_blank_values=True))
        for option in given:
            if option not in OWN_OPTIONS | set(options):
                raise ConfigError(f"{text}: {option} is no option of this hook", param="hook")
        self.options: Mapping[str, str] = given
        self.timeout_s = number(given, "timeout_s", TIMEOUT_S)
        self._headers = {"content-type": "application/json"}
        if name := given.get("key_env"):
            if not os.environ.get(name):
                raise ConfigError(f"{text}: the variable {name} is not set", param="hook")
            self._headers["authorization"] = f"Bearer {os.environ[name]}"
        path = self._url.path or "/"
        self._target = f"{path}?{self._url.query}" if self._url.query else path
        self._pool = ThreadPoolExecutor(THREADS, "hook")
        self._here = threading.local()  # .connection: each thread keeps its own open
        self._open: set[http.client.HTTPConnection] = set()

    @property
    def name(self) -> str:
        """For messages: the address without user, query and options."""
        return f"{self._url.scheme}://{self._url.netloc.rpartition('@')[2]}{self._url.path}"

    def close(self) -> None:
        """End what runs, and the connections."""
        self._pool.shutdown(cancel_futures=True)
        for connection in self._open:
            connection.close()

    async def ask(self, body: Any, path: str = "") -> Any:
        """The decoded answer to a POST, to `path` under the URL. Raises HookUnavailable."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                return await loop.run_in_executor(
                    self._pool, self._post, json.dumps(body).encode(), path
                )
        except TimeoutError:
            raise HookUnavailable(f"{self.name} did not answer in {self.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise HookUnavailable(f"{self.name}: {type(error).__name__}: {error}") from None

    def _post(self, body: bytes, path: str) -> Any:
        kept: http.client.HTTPConnection | None = getattr(self._here, "connection", None)
        if kept is not None:
            try:
                return self._exchange(kept, body, path)
            except (ConnectionError, http.client.HTTPException):
                self._drop(kept)  # the other side had closed it: once more over a new one
        made = http.client.HTTPSConnection if self._url.scheme == "https" else None
        connection = (made or http.client.HTTPConnection)(
            self._url.hostname or "", self._url.port, timeout=self.timeout_s
        )
        self._open.add(connection)
        try:
            answer = self._exchange(connection, body, path)
        except BaseException:
            self._drop(connection)
            raise
        self._here.connection = connection
        return answer

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        self._open.discard(connection)
        self._here.connection = None

    def _exchange(self, connection: http.client.HTTPConnection, body: bytes, path: str) -> Any:
        target = self._target.rstrip("/") + path if path else self._target
        connection.request("POST", target, body, self._headers)
        response = connection.getresponse()
        raw = response.read(MAX_ANSWER_BYTES)
        if response.status != 200 or len(raw) >= MAX_ANSWER_BYTES:
            connection.close()  # it may hold more than was read
            raise ValueError(f"status {response.status}, {len(raw)} bytes")
        return json.loads(raw)


def number(options: Mapping[str, str], name: str, default: float) -> float:
    """An option that is a number above 0. Raises ConfigError."""
    try:
        value = float(options.get(name, default))
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ConfigError(f"{name} = {options[name]!r}: a number above 0", param="hook")
    return value


def choice(options: Mapping[str, str], name: str, *values: str) -> str:
    """An option that is one of a few words; the first is the default. Raises ConfigError."""
    value = options.get(name, values[0])
    if value not in values:
        raise ConfigError(f"{name} = {value!r}: one of {', '.join(values)}", param="hook")
    return value

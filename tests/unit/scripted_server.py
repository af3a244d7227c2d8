"""An OpenAI-like server that answers from a script: a double for the load generator and the chat.

Each request is read in full, kept in `requests`, and answered by the script's raw bytes and pauses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

Step = bytes | float  # bytes to write, or seconds to pause
Script = Callable[[dict[str, Any]], Sequence[Step]]

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def delta(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return event({"choices": [], "usage": counts})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
DONE = b"data: [DONE]\n\n"


def whole(status: str, payload: Any) -> bytes:
    body = json.dumps(payload).encode()
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body


class ScriptedServer:
    """What it saw: bodies, header blocks, and the most requests that were open at once."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.pages: dict[str, str] = {}  # path -> text of a GET; others are 404
        self.open = self.most_open = 0
        self.was_cut = asyncio.Event()  # a client did not take its answer to the end
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        sizes = [int(x.split(":")[1]) for x in head.lower().split("\r\n") if "content-length" in x]
        body = await reader.readexactly(sizes[0]) if sizes else b"{}"
        if head.startswith("GET /v1/models"):
            writer.write(whole("200 OK", {"data": [{"id": "scripted"}]}))
            await self.close(writer)
            return
        if head.startswith("GET "):
            page = self.pages.get(head.split()[1])
            status = "404 Not Found" if page is None else "200 OK"
            raw = (page or "").encode()
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
            await self.close(writer)
            return
        self.requests.append(json.loads(body))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            for step in self.script(self.requests[-1]):
                if isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                elif reader.at_eof():
                    raise ConnectionResetError
                else:
                    await asyncio.sleep(step)
        except ConnectionError:
            self.was_cut.set()
        finally:
            self.open -= 1
            await self.close(writer)

    async def close(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(script)
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield server

"""A worker that costs next to nothing, so that what is measured is the router before it.

    python -m benchmarks.gateway.mock PORT

Answers chat requests at once: 8 words, or as a stream 32 events, one every 20 ms. `GET /count` says
how many it answered. It renders and tokenises for whoever asks (4 characters a token, not
computed), as vllm-router does for each prompt.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

EVENTS, EVENT_S = 32, 0.02  # of a stream
USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 8,
    "total_tokens": 58,
    "prompt_tokens_details": {"cached_tokens": 0},
}
WHOLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "a b c d e f g h"},
            "finish_reason": "stop",
        }
    ],
    "usage": USAGE,
}
DELTA = {"index": 0, "delta": {"content": "tok "}, "logprobs": None, "finish_reason": None}
PIECE = WHOLE | {"object": "chat.completion.chunk", "choices": [DELTA]}
del PIECE["usage"]
USED = PIECE | {"choices": [], "usage": USAGE}
FACTS = {  # what routers ask at their start
    b"/health": {"status": "ok"},
    b"/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
    b"/model_info": {"served_model_name": "m"},
    b"/server_info": {"served_model_name": "m"},
    b"/get_model_info": {"served_model_name": "m"},
    b"/get_server_info": {"served_model_name": "m"},
    b"/version": {"version": "0"},
}
TOKENS = 4  # characters a token


def answer(said: object, status: bytes = b"200 OK") -> bytes:
    """A whole answer in JSON."""
    body = json.dumps(said).encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def event(said: bytes) -> bytes:
    """One event as a chunk."""
    line = b"data: %b\n\n" % said
    return b"%x\r\n%b\r\n" % (len(line), line)


WHOLE_ANSWER = answer(WHOLE)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
PIECE_EVENT = event(json.dumps(PIECE).encode())
LAST_EVENTS = event(json.dumps(USED).encode()) + event(b"[DONE]") + b"0\r\n\r\n"


class Worker(asyncio.Protocol):
    """One connection: requests with a content-length or in chunks that end a segment."""

    answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._rest = b""
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (end := self._rest.find(b"\r\n\r\n")) >= 0:
            head = self._rest[:end].lower()
            size, at = 0, head.find(b"content-length: ")
            if at >= 0:
                size = int(head[at + 16 :].split(b"\r\n", 1)[0])
            elif b"transfer-encoding: chunked" in head:
                last = self._rest.find(b"0\r\n\r\n", end + 4)
                if last < 0:
                    return
                size = last + 5 - end - 4
            if len(self._rest) < end + 4 + size:
                return
            body = self._rest[end + 4 : end + 4 + size]
            target = self._rest[:end].split(b" ", 2)[1].partition(b"?")[0]
            self._rest = self._rest[end + 4 + size :]
            self._answer(target, body)

    def _answer(self, target: bytes, body: bytes) -> None:
        write = self._transport.write
        if target.endswith((b"/render", b"/tokenize")):
            ids = list(range(len(body) // TOKENS))
            write(answer({"tokens": ids, "token_ids": ids, "count": len(ids)}))
        elif target == b"/v1/chat/completions":
            Worker.answered += 1
            if b'"stream":true' in body or b'"stream": true' in body:
                write(STREAM_HEAD)
                self._loop.call_later(EVENT_S, self._tick, EVENTS)
            else:
                write(WHOLE_ANSWER)
        elif target == b"/count":
            write(answer({"answered": Worker.answered}))
        elif target in FACTS:
            write(answer(FACTS[target]))
        else:
            write(answer({"error": {"message": "no such route"}}, b"404 Not Found"))

    def _tick(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(PIECE_EVENT)
            self._loop.call_later(EVENT_S, self._tick, left - 1)
        else:
            self._transport.write(LAST_EVENTS)


async def serve(port: int) -> None:
    """Until it is killed."""
    server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))

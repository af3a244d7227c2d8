"""Processor time of one HTTP process per streamed token, in microseconds.

python -m benchmarks.api_cost [--streams 1 16 64 256] [--tokens 200] [--step-ms 20]

Two views. "loop": decode an engine message, detokenise, build the SSE bytes, hand them to a send
that drops them. "process": a real HTTP process between the engine on the fake runner and a client
that reads and drops; its user and system time over all streams, less an idle stretch, by tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import selectors
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil

from headrace.api.answer import Answer, Reply
from headrace.api.chat import ChatChunks
from headrace.api.exchange import Exchange
from headrace.api.metering import Meter
from headrace.api.prepare import Prepared
from headrace.api.service import Service
from headrace.api.stream import EventStream
from headrace.engine.client import EngineClient, Job
from headrace.engine.token_stream import TokenStream
from headrace.hooks.load import Hooks
from headrace.messages import Done, End, TokenOut
from headrace.observe.metrics import ApiMetrics
from headrace.prices import Prices
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import load_tokenizer
from tests.e2e.serving import Server

RESULTS = Path(__file__).parent / "results" / "api_cost.json"
PATH = "/v1/chat/completions"


class DrivenClient(EngineClient):
    """Without sockets: messages are handed to `_deliver` by the benchmark."""

    def __init__(self) -> None:
        super().__init__(Path())

    def open(self, handle: int) -> TokenStream:
        stream = TokenStream(self, 1, time.monotonic())
        stream.opened(handle)
        self._routes[handle] = (stream, 0)
        return stream

    def deliver(self, payload: bytes) -> None:
        self._deliver(self._decode_out(payload))


async def _receive() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("never set")


async def _send(message: Any) -> None:
    pass


async def loop_cost(streams: int, tokens: int) -> float:
    """Microseconds per token without sockets."""
    tokenizer = load_tokenizer(ModelFiles("fake", "fake", Path()))
    facts = SimpleNamespace(tokenizer=tokenizer, eos_ids=[256, 258], hooks=Hooks())
    service = cast(Service, facts)
    client, metrics = DrivenClient(), METRICS
    meter = Meter("fake", Prices(), metrics.usage, "", 1.0)
    reply = Reply("chatcmpl-" + "0" * 24, 1, "model", "fp_0", False, False)
    prepared = Prepared([Job([1], tokens)], 1, [], True, False, [])
    tasks = []
    for handle in range(streams):
        answer = Answer(service, prepared, client.open(handle))
        exchange = Exchange("x", _send)
        bill = meter.open(exchange, "", prepared.jobs, prepared.prompt_tokens)
        response = EventStream(answer, ChatChunks(reply, 1), exchange, metrics, {}, bill)
        tasks.append(asyncio.create_task(response({}, _receive, _send)))
    await asyncio.sleep(0)
    handles, zeros = list(range(streams)), [0] * streams
    step = msgspec.msgpack.encode(TokenOut(handles, zeros, [101] * streams, [], []))
    ends = [End(handle, 0, "length") for handle in handles]
    last = msgspec.msgpack.encode(TokenOut([], [], [], ends, [Done(h) for h in handles]))
    start_s = time.process_time()
    for _ in range(tokens):
        client.deliver(step)
        await asyncio.sleep(0)  # the woken tasks run
        await asyncio.sleep(0)
    spent_s = time.process_time() - start_s
    client.deliver(last)
    await asyncio.gather(*tasks)
    return spent_s / (streams * tokens) * 1e6


def _read_all(port: int, streams: int, tokens: int) -> int:
    """Open the streams, read them to their end in one thread; returns events seen."""
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    raw = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head.encode() + b"\r\n" + raw)
        selector.register(sock, selectors.EVENT_READ)
    seen = 0
    while selector.get_map():
        for key, _ in selector.select():
            sock = cast(socket.socket, key.fileobj)
            data = sock.recv(1 << 16)
            seen += data.count(b"data: ")
            if not data:
                selector.unregister(sock)
                sock.close()
    return seen


def process_cost(streams: int, tokens: int, step_ms: float) -> tuple[float, float]:
    """Microseconds of processor time per token, and events per token (1 = nothing merged)."""
    blocks = 64 + streams * (tokens // 16 + 4)
    limits = {"max_num_seqs": streams, "max_num_batched_tokens": max(512, 2 * streams)}
    with Server(fake_step_ms=step_ms, kv_blocks=blocks, **limits) as server:
        process = psutil.Process(server.apis[0].pid)
        _read_all(server.port, min(4, streams), 5)
        before_s, start_s = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(1.0)
        idle = (sum(process.cpu_times()[:2]) - before_s) / (time.monotonic() - start_s)
        before_s, start_s = sum(process.cpu_times()[:2]), time.monotonic()
        seen = _read_all(server.port, streams, tokens)
        wall_s = time.monotonic() - start_s
        spent_s = sum(process.cpu_times()[:2]) - before_s - idle * wall_s
    total = streams * tokens
    return spent_s / total * 1e6, (seen - 3 * streams) / total


METRICS = ApiMetrics("bench")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0)
    chosen = parser.parse_args()
    rows = []
    print(f"{'streams':>8} {'loop us/token':>14} {'process us/token':>17} {'events/token':>13}")
    for streams in chosen.streams:
        loop_us = asyncio.run(loop_cost(streams, chosen.tokens))
        process_us, events = process_cost(streams, chosen.tokens, chosen.step_ms)
        print(f"{streams:>8} {loop_us:>14.1f} {process_us:>17.1f} {events:>13.2f}", flush=True)
        rows.append(
            {
                "streams": streams,
                "loop_us_per_token": round(loop_us, 2),
                "process_us_per_token": round(process_us, 2),
                "events_per_token": round(events, 3),
            }
        )
    RESULTS.parent.mkdir(exist_ok=True)
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": psutil.cpu_count(),
        "tokens": chosen.tokens,
        "step_ms": chosen.step_ms,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

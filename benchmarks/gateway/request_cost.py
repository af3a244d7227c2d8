"""Processor time of one short request in the gateway, in microseconds, without sockets.

    python -m benchmarks.gateway.request_cost [--rounds 30]

64 requests that came together, one after another through the real parser, placement and writers,
over transports that drop what they get:

    before     from the bytes of a request to those that its worker gets: of many that come together
               each waits for that of all before it
    forwarded  the rest of its turn
    answered   a whole answer
    began      the head of a stream and its first event
    chunk      one event more
    ended      its last events: usage and [DONE]

Medians of 64, the lowest of all rounds: what the work takes when nobody disturbs it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from typing import Any, cast

import uvloop

from benchmarks.gateway.load import KEY, chats
from benchmarks.gateway.mock import LAST_EVENTS, PIECE_EVENT, STREAM_HEAD, WHOLE_ANSWER
from headrace.gateway.app import Gateway
from headrace.gateway.connection import Client
from headrace.gateway.registry import StaticRegistry
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.tenants import Doorkeeper, KeySpec, TierSpec
from headrace.gateway.upstream import Upstream

TOGETHER, CHARACTERS = 64, 200
URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")


class Sink:
    """A transport that drops what it gets and notes when that was."""

    written_ns = 0  # of all of them

    def write(self, data: bytes) -> None:
        Sink.written_ns = time.perf_counter_ns()

    def get_extra_info(self, name: str) -> None:
        """No socket."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing to close."""

    abort = pause_reading = resume_reading = close


def made() -> Gateway:
    """A gateway with keys, limits and metrics, and two workers that are up."""
    specs = tuple(WorkerSpec(url=url) for url in URLS)
    tiers = {"t": TierSpec(requests_per_min=10**8, tokens_per_min=10**9, parallel=10_000)}
    doorkeeper = Doorkeeper([KeySpec(key=KEY, tier="t", admin=True)], tiers)
    gateway = Gateway(GatewaySettings(), StaticRegistry(specs), doorkeeper)
    gateway.fleet.apply(specs)
    for worker in gateway.fleet.workers.values():
        worker.models = ("m",)
        gateway.fleet.came_up(worker)
    return gateway


def connected(gateway: Gateway) -> tuple[list[Client], list[Upstream]]:
    """Connections that stay: one a client, and at each worker as many."""
    upstreams = []
    for worker in gateway.fleet.workers.values():
        for _ in range(TOGETHER):
            upstream = Upstream(worker.pool)
            upstream.connection_made(cast(Any, Sink()))
            worker.pool.give_back(upstream)
            upstreams.append(upstream)
    clients = [Client(gateway._handle, gateway.clients, 2**20) for _ in range(TOGETHER)]
    for client in clients:
        client.connection_made(cast(Any, Sink()))
    return clients, upstreams


def turn(
    gateway: Gateway,
    clients: list[Client],
    upstreams: list[Upstream],
    ready: list[bytes],
    answer: list[bytes],
) -> dict[str, float]:
    """Microseconds of each part, a request's."""
    before_ns, forwarded_ns = list[int](), list[int]()
    for client, request in zip(clients, ready, strict=True):
        begun_ns = time.perf_counter_ns()
        client.data_received(request)
        forwarded_ns.append(time.perf_counter_ns() - Sink.written_ns)
        before_ns.append(Sink.written_ns - begun_ns)
    asked = [upstream for upstream in upstreams if upstream._answer is not None]
    assert len(asked) == len(ready), "every request was forwarded"
    parts_ns = [0] * len(answer)
    for i, piece in enumerate(answer):
        begun_ns = time.perf_counter_ns()
        for upstream in asked:
            upstream.data_received(piece)
        parts_ns[i] = time.perf_counter_ns() - begun_ns
    assert not gateway.exchanges, "every request was answered"
    each = 1e3 * len(ready)
    found = {
        "before": statistics.median(before_ns) / 1e3,
        "forwarded": statistics.median(forwarded_ns) / 1e3,
    }
    if len(answer) == 1:
        return found | {"answered": parts_ns[0] / each}
    return {
        "began": (parts_ns[0] + parts_ns[1]) / each,
        "chunk": min(parts_ns[2:-1]) / each,
        "ended": parts_ns[-1] / each,
    }


async def measure(rounds: int) -> dict[str, float]:
    """The lowest of all rounds."""
    gateway, best = made(), dict[str, float]()
    clients, upstreams = connected(gateway)
    stream = [STREAM_HEAD, *[PIECE_EVENT] * 8, LAST_EVENTS]
    for requests, answer in (
        (chats(CHARACTERS, stream=False), [WHOLE_ANSWER]),
        (chats(CHARACTERS, stream=True), stream),
    ):
        for _ in range(rounds):
            ready = list(itertools.islice(requests, TOGETHER))
            for name, us in turn(gateway, clients, upstreams, ready, answer).items():
                best[name] = min(us, best.get(name, us))
            await asyncio.sleep(0)
    return best


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30)
    for name, us in uvloop.run(measure(parser.parse_args().rounds)).items():
        print(f"{name:10} {us:6.1f} us")


if __name__ == "__main__":
    main()

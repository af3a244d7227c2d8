"""Policies over 8 real servers whose devices are modelled, beside what the simulator says of them.

    python -m benchmarks.gateway.fleet --peers DIR [--seconds 6] [--slower 4] [--only token_cost]

Each worker is `headrace serve` on the fake backend, with the prefix cache, scheduler and HTTP edge
of any other; its steps take what `headrace sim` says of an H100 with a 14B model, `--slower` times
over, so that 8 of them fit on a few cores and idle ones lend nobody their speed. Before them, in
turn: this gateway with several policies, vllm-router and sglang-router. Two workloads, each as one
trace that `headrace bench` replays and the simulator runs: prefixes that many share, and
conversations. A load of 1 is where computing every prompt whole would take all of all devices'
time.

Under 5 minutes at the defaults. Writes benchmarks/results/gateway-fleet-DATE.json, .md, .svg, .png.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.gateway.load import KEY
from benchmarks.gateway.replays import (
    WORKLOADS,
    Point,
    Sizes,
    curves,
    measured_point,
    trace,
    workload,
    write,
)
from benchmarks.gateway.routers import ROUTERS, Router, running
from headrace import __version__
from headrace.bench.load import Target, run_loop
from headrace.bench.measure import Meter
from headrace.bench.stats import Level, Shape
from headrace.bench.workload import WORDS
from headrace.bench.workload import Workload as Load
from headrace.sim.device import H100_14B, Device
from tests.e2e.serve_process import ServeProcess

RESULTS = Path(__file__).parents[1] / "results"
WORKERS = 8
BLOCK = 128  # the fake model's tokens are bytes
WORDS_A_BLOCK = round(BLOCK * len(WORDS) / sum(len(word) + 1 for word in WORDS))
KV_TOKENS = H100_14B.kv_tokens // WORKERS
SIZES = Sizes(workers=WORKERS, block=BLOCK, prefixes=16, output_tokens=24, kv_tokens=KV_TOKENS)
LOADS = (0.5, 1.2, 2.5)
SIMULATED = ("token_cost", "least_tokens", "round_robin", "prefix_affinity")
OURS = tuple(Router("headrace", policy) for policy in ("token_cost", "least_tokens", "round_robin"))
PEERS = tuple(router for router in ROUTERS if router.policy == "cache_aware")


def slowed(times: float) -> Device:
    """The measured card, so many times slower."""
    cost = H100_14B.cost
    fields = ("floor_s", "token_s", "base_s", "pair_s", "read_s")
    return msgspec.structs.replace(
        H100_14B,
        name=f"h100-14b, {times:g} times slower",
        cost=msgspec.structs.replace(cost, **{f: getattr(cost, f) * times for f in fields}),
        kv_tokens=KV_TOKENS,
        target_s=H100_14B.target_s * times,
    )


@contextlib.contextmanager
def servers(device: Device, folder: Path) -> Iterator[list[str]]:
    """URLs of the workers."""
    file = folder / "device.json"
    file.write_bytes(msgspec.json.encode(device))
    flags = [
        *("--backend", "fake", "--fake-device", str(file), "--kv-blocks", str(KV_TOKENS // 16)),
        *("--itl-target-ms", str(1e3 * device.target_s), "--log-level", "warning"),
        *("--max-num-batched-tokens", str(device.max_step_tokens)),
        *("--max-num-seqs", str(device.max_seqs)),
    ]
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(ServeProcess(*flags, wait=False)) for _ in range(WORKERS)]
        for server in started:
            server.wait_ready()
        yield [server.url for server in started]


async def measured(url: str, file: Path, nonce: str) -> Level:
    """The whole trace, replayed over HTTP; nobody has seen its words before."""
    load = Load(trace=str(file), trace_block_tokens=WORDS_A_BLOCK, requests=0, nonce=nonce)
    meter = Meter(Target(url=url, model="fake", api_key=KEY, timeout_s=60.0), load)
    return await meter.level(Shape(trace=True))


def runs(routers: Sequence[Router], device: Device, seconds: float, peers: Path) -> list[Point]:
    """All of them, one after another."""
    points = []
    with tempfile.TemporaryDirectory() as name, servers(device, Path(name)) as urls:
        for router in routers:
            with running(router, urls, peers, Path(name)) as process:
                for number in range(len(WORKLOADS)):
                    for load in LOADS:
                        asked = workload(number, load, device, seconds, SIZES)
                        file = Path(name) / "trace.jsonl"
                        trace(asked, file, WORDS_A_BLOCK)
                        nonce, url = (
                            f"{router.label} {number} {load}",
                            f"http://127.0.0.1:{process.port}",
                        )
                        level = run_loop(measured(url, file, nonce))
                        points.append(
                            measured_point(asked, router.name, router.policy, load, level)
                        )
                        print(points[-1], flush=True)
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="their environment")
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals a level")
    parser.add_argument("--slower", type=float, default=4.0, help="than the measured card")
    parser.add_argument("--only", default="", help="routers whose label contains this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    device = slowed(asked.slower)
    here = (asked.peers / "bin" / "python").exists()
    routers = [r for r in (*OURS, *(PEERS if here else ())) if asked.only in r.label]
    points = [
        *runs(routers, device, asked.seconds, asked.peers),
        *curves(device, asked.seconds, SIZES, LOADS, SIMULATED),
    ]
    day = time.strftime("%Y-%m-%d")
    title = f"{WORKERS} servers on modelled devices ({device.name}), {day}"
    facts: dict[str, object] = {
        "title": title,
        "headrace": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "seconds": asked.seconds,
        "device": device,
    }
    stem = asked.out / f"gateway-fleet-{day}"
    print(write(points, stem, facts))


if __name__ == "__main__":
    main()

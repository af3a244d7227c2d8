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
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.gateway.load import KEY
from benchmarks.gateway.routers import ROUTERS, Router, running
from headrace import __version__
from headrace.bench.figure import COLOURS, INK, drawn
from headrace.bench.load import Target, run_loop
from headrace.bench.measure import Meter
from headrace.bench.stats import Level, Shape
from headrace.bench.trace import BLOCK_TOKENS, TraceLine
from headrace.bench.workload import WORDS
from headrace.bench.workload import Workload as Load
from headrace.sim.device import H100_14B, Device
from headrace.sim.run import Fleet, Outcome, simulate
from headrace.sim.workload import Request, Workload
from tests.e2e.serve_process import ServeProcess

RESULTS = Path(__file__).parents[1] / "results"
WORKERS = 8
BLOCK = 128  # tokens of a block of the workloads; the fake model's tokens are bytes
WORDS_A_BLOCK = round(BLOCK * len(WORDS) / sum(len(word) + 1 for word in WORDS))
KV_TOKENS = H100_14B.kv_tokens // WORKERS
OUTPUT_TOKENS = 24
LOADS = (0.5, 1.2, 2.5)
SIMULATED = ("token_cost", "least_tokens", "round_robin", "prefix_affinity")
OURS = tuple(Router("headrace", policy) for policy in ("token_cost", "least_tokens", "round_robin"))
PEERS = tuple(router for router in ROUTERS if router.policy == "cache_aware")
DASHES = {"token_cost": "-", "least_tokens": "--", "round_robin": ":", "prefix_affinity": "-."}


class Point(msgspec.Struct, kw_only=True):
    """One run: measured, or simulated where `router` is empty. Times in seconds."""

    workload: str
    router: str
    policy: str
    load: float
    requests: int
    failed: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    hit_share: float  # of all prompt tokens: found in a worker's cache, as it said
    requests_per_s: float

    @property
    def label(self) -> str:
        """For tables and plots."""
        return f"{self.router or 'simulated'} {self.policy}"


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


def shared_prefixes(per_s: float, seconds: float, seed: int) -> Workload:
    """16 prefixes of 24 blocks, drawn alike, each with 2 blocks of its own."""
    draw = random.Random(seed)
    asked, at_s, spare = [], 0.0, 16 * 24
    while (at_s := at_s + draw.expovariate(per_s)) < seconds:
        first = 24 * draw.randrange(16)
        chain = (*range(first, first + 24), spare, spare + 1)
        spare += 2
        asked.append(Request(at_s, len(chain) * BLOCK, OUTPUT_TOKENS, chain))
    return Workload("shared prefixes", tuple(asked), BLOCK)


def conversations(per_s: float, seconds: float, seed: int) -> Workload:
    """Of 4 turns 1 to 2 seconds apart: 12 blocks, then 6 more each turn."""
    draw = random.Random(seed)
    turns: list[tuple[float, tuple[int, ...], str]] = []
    at_s, spare = -2.0, 0
    while (at_s := at_s + draw.expovariate(per_s / 4)) < seconds:
        turn_s, chain = at_s, tuple(range(spare, spare + 12))
        spare += 12
        for _ in range(4):
            turns.append((turn_s, chain, f"s{spare}"))
            turn_s += draw.uniform(1, 2)
            chain = (*chain, *range(spare, spare + 6))
            spare += 6
    asked = [
        Request(turn_s, len(chain) * BLOCK, OUTPUT_TOKENS, chain, session)
        for turn_s, chain, session in sorted(turns)
        if 0 <= turn_s < seconds
    ]
    return Workload("conversations", tuple(asked), BLOCK)


WORKLOADS = (shared_prefixes, conversations)
MEAN_TOKENS = {shared_prefixes: 26 * BLOCK, conversations: 21 * BLOCK}  # of a prompt


def workload(number: int, load: float, device: Device, seconds: float) -> Workload:
    """Workload `number` at that load of the fleet."""
    make = WORKLOADS[number]
    per_s = load * WORKERS / (device.cost.token_s * MEAN_TOKENS[make])
    return make(per_s, seconds, seed=number)


def trace(asked: Workload, path: Path) -> None:
    """As `headrace bench` replays it with `WORDS_A_BLOCK` words a block."""
    lines = [
        TraceLine(
            timestamp=1e3 * request.arrival_s,
            input_length=len(request.chain) * BLOCK_TOKENS,
            output_length=-(-request.output_tokens * BLOCK_TOKENS // WORDS_A_BLOCK),
            hash_ids=list(request.chain),
        )
        for request in asked.requests
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))


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


def point(asked: Workload, router: Router, load: float, level: Level) -> Point:
    """A measured one."""
    assert level.ttft_s is not None, f"{router.label}: nothing was answered: {level.errors}"
    assert level.requests == len(asked.requests), f"{level.requests} of {len(asked.requests)} sent"
    return Point(
        workload=asked.name,
        router=router.name,
        policy=router.policy,
        load=load,
        requests=level.requests,
        failed=sum(level.errors.values()),
        ttft_mean_s=level.ttft_s.mean,
        ttft_p50_s=level.ttft_s.p50,
        ttft_p90_s=level.ttft_s.p90,
        hit_share=level.cached_tokens / max(1, level.prompt_tokens),
        requests_per_s=level.requests_per_s,
    )


def simulated(asked: Workload, load: float, policy: str, out: Outcome) -> Point:
    """One of the simulator's."""
    return Point(
        workload=asked.name,
        router="",
        policy=policy,
        load=load,
        requests=len(asked.requests),
        failed=0,
        ttft_mean_s=out.ttft_s.mean,
        ttft_p50_s=out.ttft_s.p50,
        ttft_p90_s=out.ttft_s.p90,
        hit_share=out.hit_share,
        requests_per_s=len(asked.requests) / out.makespan_s,
    )


def curves(device: Device, seconds: float) -> list[Point]:
    """What the simulator says of the same traces."""
    fleet = Fleet(device=device, workers=WORKERS)
    points = []
    for number in range(len(WORKLOADS)):
        for load in LOADS:
            asked = workload(number, load, device, seconds)
            for policy in SIMULATED:
                points.append(simulated(asked, load, policy, simulate(asked, fleet, policy)))
    return points


def runs(routers: Sequence[Router], device: Device, seconds: float, peers: Path) -> list[Point]:
    """All of them, one after another."""
    points = []
    with tempfile.TemporaryDirectory() as name, servers(device, Path(name)) as urls:
        for router in routers:
            with running(router, urls, peers, Path(name)) as process:
                for number in range(len(WORKLOADS)):
                    for load in LOADS:
                        asked = workload(number, load, device, seconds)
                        file = Path(name) / "trace.jsonl"
                        trace(asked, file)
                        nonce, url = (
                            f"{router.label} {number} {load}",
                            f"http://127.0.0.1:{process.port}",
                        )
                        level = run_loop(measured(url, file, nonce))
                        points.append(point(asked, router, load, level))
                        print(points[-1], flush=True)
    return points


def page(points: Sequence[Point], facts: dict[str, object]) -> str:
    """The table."""
    lines = [f"# {facts['title']}", ""]
    lines += ["| workload | load | router | TTFT mean s | p50 | p90 | hits | req/s | failed |"]
    lines += ["|---|---:|---|---:|---:|---:|---:|---:|---:|"]
    for p in sorted(points, key=lambda p: (p.workload, p.load, not p.router, p.ttft_mean_s)):
        lines.append(
            f"| {p.workload} | {p.load} | {p.label} | {p.ttft_mean_s:.3f} | {p.ttft_p50_s:.3f} | "
            f"{p.ttft_p90_s:.2f} | {p.hit_share:.0%} | {p.requests_per_s:.1f} | {p.failed} |"
        )
    return "\n".join(lines) + "\n"


def draw(points: Sequence[Point], stem: Path, title: str) -> None:
    """Mean TTFT against load: marks are measured, lines without marks simulated."""
    names = list(dict.fromkeys(p.workload for p in points))
    labels = list(dict.fromkeys(p.label for p in points if p.router))
    with drawn(stem, 5 * len(names), 4.5) as figure:
        axes = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for axis, name in zip(axes, names, strict=True):
            here = [p for p in points if p.workload == name]
            for policy, dash in DASHES.items():
                line = [(p.load, p.ttft_mean_s) for p in here if p.label == f"simulated {policy}"]
                axis.plot(*zip(*line, strict=True), dash, color=INK, label=f"simulated {policy}")
            for colour, label in zip(COLOURS, labels, strict=False):
                line = [(p.load, p.ttft_mean_s) for p in here if p.label == label]
                axis.plot(*zip(*line, strict=True), "-o", markersize=4, color=colour, label=label)
            axis.patch.set_alpha(0)
            axis.set_yscale("log")
            axis.set_title(name, fontsize=10)
            axis.set_xlabel("load: prompts' time uncached / fleet's time")
        axes[0].set_ylabel("TTFT, mean, seconds")
        figure.suptitle(title)
        handles, texts = axes[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=4, frameon=False)


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
    points = [*runs(routers, device, asked.seconds, asked.peers), *curves(device, asked.seconds)]
    day = time.strftime("%Y-%m-%d")
    title = f"{WORKERS} servers on modelled devices ({device.name}), {day}"
    facts: dict[str, object] = {
        "title": title,
        "headrace": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "seconds": asked.seconds,
    }
    stem = asked.out / f"gateway-fleet-{day}"
    stem.with_suffix(".json").write_bytes(
        msgspec.json.format(msgspec.json.encode({**facts, "device": device, "points": points}))
    )
    text = page(points, facts)
    stem.with_suffix(".md").write_text(text)
    draw(points, stem, title)
    print(text)


if __name__ == "__main__":
    main()

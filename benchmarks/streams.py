"""What a token costs the server's processes while 1,000 streams are open, in CPU microseconds.

    python -m benchmarks.streams [--streams 1000] [--tokens 100] [--step-ms 150] [--workers 1]

`headrace bench` in this process against a server on the fake backend, whose step takes `step-ms`
whatever it holds: every stream gets a token a step, so the load is streams / step. The figures
count only where nobody is at a limit: `doubts` names a process that used over 0.9 cores, a
generator that saw chunks late, steps that came late. Writes benchmarks/results/streams.json; about
25 s at the defaults on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil

from headrace.bench.load import Target, run_loop
from headrace.bench.measure import Meter
from headrace.bench.report import bottleneck, conditions
from headrace.bench.stats import Level, Shape
from headrace.bench.workload import Workload
from tests.e2e.serving import Server

RESULTS = Path(__file__).parent / "results" / "streams.json"
BUSY_CORES = 0.9
LATE = 1.1  # inter-token latency over the step's time


def cpu_s(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """User and system seconds so far of each part."""
    return {
        part: sum(sum(process.cpu_times()[:2]) for process in group)
        for part, group in processes.items()
    }


def measure(
    streams: int, tokens: int, step_ms: float, workers: int, apis: int
) -> tuple[Level, dict[str, float]]:
    """The level, and the CPU seconds of each part of the server while it ran."""
    limits = {"max_num_seqs": streams, "max_num_batched_tokens": max(512, 2 * streams)}
    blocks = 64 + streams * (tokens // 16 + 8)
    with Server(
        workers=apis, fake_step_ms=step_ms, kv_blocks=blocks, max_queue=2 * streams, **limits
    ) as server:
        processes = {
            "engine": [psutil.Process(server.engine.pid)],
            "http": [psutil.Process(api.pid) for api in server.apis],
        }
        load = Workload(requests=streams, max_tokens=tokens, prompt_tokens=8)
        meter = Meter(Target(url=server.url, model="fake"), load, workers=workers)

        async def run() -> tuple[Level, dict[str, float]]:
            await meter.warm_up(4)
            before = cpu_s(processes)
            level = await meter.level(Shape(concurrency=streams))
            after = cpu_s(processes)
            return level, {part: after[part] - before[part] for part in processes}

        return run_loop(run())


def doubts(level: Level, spent_s: dict[str, float], step_ms: float, apis: int) -> list[str]:
    """Why the figures are those of a machine at its limit; empty where it was not."""
    found = [f"errors: {level.errors | level.sheds}"] if level.errors or level.sheds else []
    for part, seconds in spent_s.items():
        cores = seconds / level.duration_s / (apis if part == "http" else 1)
        if cores > BUSY_CORES:
            found.append(f"{part} used {cores:.2f} cores a process")
    found += [f"the load generator {why}" for why in bottleneck(level)]
    if level.itl_s is None or level.itl_s.p50 > LATE * step_ms / 1e3:
        found.append("steps came late: the engine's process is at its limit")
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=150.0)
    parser.add_argument("--workers", type=int, default=1, help="of the load generator")
    parser.add_argument("--apis", type=int, default=1, help="HTTP processes of the server")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    began_s = time.monotonic()
    level, spent_s = measure(args.streams, args.tokens, args.step_ms, args.workers, args.apis)
    tokens = max(1, level.output_tokens)
    chunks = (level.icl_s.count + level.requests) / tokens if level.icl_s else 0.0
    found: dict[str, Any] = {
        "streams": args.streams,
        "tokens": level.output_tokens,
        "tokens_per_s": level.output_tokens_per_s,
        "in_flight": level.in_flight,
        "step_ms": args.step_ms,
        "itl_p50_ms": level.itl_s.p50 * 1e3 if level.itl_s else None,
        "itl_p99_ms": level.itl_s.p99 * 1e3 if level.itl_s else None,
        "chunks_per_token": chunks,
        "us_per_token": {part: seconds / tokens * 1e6 for part, seconds in spent_s.items()},
        "client_cores": level.client_cores,
        # with several workers: as if all were as busy as the busiest
        "client_us_per_token": (level.client_cores or 0)
        * args.workers
        * level.duration_s
        / tokens
        * 1e6,
        "doubts": doubts(level, spent_s, args.step_ms, args.apis),
        "conditions": conditions(http_processes=str(args.apis), load_workers=str(args.workers)),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print(f"{time.monotonic() - began_s:.0f} s, written: {args.out}")


if __name__ == "__main__":
    main()

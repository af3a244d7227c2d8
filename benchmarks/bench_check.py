"""Is what `headrace bench` says true? Against a server whose every delay is known.

    python -m benchmarks.bench_check [--requests 24] [--at 2] [--workers 1]

A child process answers with the role chunk at once, the first token after 200 ms, then a token each
20 ms, 40 in all, and the end 30 ms after the last. Delays are kept by absolute times, so that what
a busy server would add does not add up. Prints each figure beside what it must be, and fails when
a mean or median is off by more than 1 ms and more than 1 %. It needs an idle core for each side;
exactness of the sums is tested on a virtual clock (tests/unit/test_bench_drive.py).
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time

from headrace.bench.load import Target, run_loop
from headrace.bench.measure import Meter
from headrace.bench.report import bottleneck
from headrace.bench.stats import Level, Shape
from headrace.bench.workload import Workload
from tests.unit.scripted_server import DONE, ROLE, SSE_HEAD, delta, usage

FIRST_S, GAP_S, TAIL_S, TOKENS = 0.2, 0.02, 0.03, 40
MUST_S = {
    "ttft_s": FIRST_S,
    "itl_s": GAP_S,
    "icl_s": GAP_S,
    "e2e_s": FIRST_S + (TOKENS - 1) * GAP_S + TAIL_S,
    "tpot_s": ((TOKENS - 1) * GAP_S + TAIL_S) / (TOKENS - 1),
}
MUST_S["normalised_s"] = MUST_S["e2e_s"] / TOKENS


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request, by the clock."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        start_s = time.monotonic()
        size = next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
        await reader.readexactly(int(size.split(b":")[1]))
        writer.write(SSE_HEAD + ROLE)
        for token in range(TOKENS):
            await until(start_s + FIRST_S + token * GAP_S)
            writer.write(delta("x"))
        await until(start_s + FIRST_S + (TOKENS - 1) * GAP_S + TAIL_S)
        writer.write(delta("", "length") + usage(9, TOKENS) + DONE)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client went away
    finally:
        writer.close()


async def until(at_s: float) -> None:
    # The event loop rounds a sleep up to whole milliseconds: the last two are waited by yielding.
    await asyncio.sleep(max(0.0, at_s - time.monotonic() - 0.002))
    while time.monotonic() < at_s:  # noqa: ASYNC110 - no event: only the clock says when
        await asyncio.sleep(0)


async def serve() -> None:
    """The child: prints its port, answers until it is stopped."""
    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


def measured(requests: int, at: int, workers: int) -> Level:
    """One closed loop against a fresh child."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bench_check", "--serve"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None, "made with a pipe"
        url = f"http://127.0.0.1:{int(child.stdout.readline())}"
        load = Workload(requests=requests)
        meter = Meter(Target(url=url, model="known"), load, workers=workers)

        async def run() -> Level:
            await meter.warm_up(1)
            return await meter.level(Shape(concurrency=at))

        return run_loop(run())
    finally:
        child.kill()
        child.wait()


def main() -> None:
    """Print the table; exit code 1 where a figure is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--at", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
        return
    level = measured(args.requests, args.at, args.workers)
    wrong = 0
    print(f"{'figure':>14} {'must be ms':>11} {'mean':>9} {'p50':>9} {'p99':>9} {'max':>9}")
    for name, must_s in MUST_S.items():
        found = getattr(level, name)
        values = [found.mean, found.p50, found.p99, found.max]
        print(f"{name:>14} {must_s * 1e3:11.3f} " + " ".join(f"{v * 1e3:9.3f}" for v in values))
        wrong += any(abs(v - must_s) > max(0.001, 0.01 * must_s) for v in values[:2])
    rounds = args.requests / args.at
    must = args.requests * TOKENS / (rounds * MUST_S["e2e_s"])
    print(f"{'tok/s':>14} {must:11.1f} {level.output_tokens_per_s:9.1f}")
    wrong += abs(level.output_tokens_per_s - must) > 0.01 * must
    wrong += level.requests != args.requests or bool(level.errors)
    for why in bottleneck(level):
        print(f"the load generator {why}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()

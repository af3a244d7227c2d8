"""What recording requests costs a server: nothing kept, the default, a full record, an open page.

    python -m benchmarks.recording [--rounds N] [--only model|fake] [--seconds 1.1]

Each round starts two servers side by side, one with `--record-count 0` (`off`) and one with the
defaults, and loads them in turn, there and back, so that what drifts falls out:

    off light full page   page full light off            (the default model)
    off light full off light page   page light off full light off   (the fake backend)

64 streams, always: 63 that are counted, and one beside them that asks for a full record each time
in `full`, and not in the others. `page`: somebody also asks what an open page asks, the live events
and each second the stages and the newest requests. On the default model the device is the limit; on
the fake backend, whose steps take no time, the HTTP process is, and a request is as cheap as it
gets. The figure is a ratio to `off` of the same round, of tokens a second and of processor time a
token of all processes of the server; the interval is Student's, 95 %, over rounds, whose servers
are new ones each.

`direct_us` is what a light record takes by itself, in this process: all its calls in a loop. Beside
the processor time that a whole request took it says how much there is for the ratios to find.

Writes benchmarks/results/recording.json; under 5 minutes on two cores at the defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from headrace.api.exchange import Exchange
from headrace.api.metering import Caller, parameters_of
from headrace.api.recorder import Recorder
from headrace.bench.cpu import CpuMeter
from headrace.bench.load import Target, client_session, first_model, run_loop
from headrace.bench.measure import Meter
from headrace.bench.report import conditions
from headrace.bench.stats import Level, Shape
from headrace.bench.workload import Workload
from headrace.engine.client import Job
from headrace.messages import Sampling
from tests.e2e.serve_process import ServeProcess

RESULTS = Path(__file__).parent / "results" / "recording.json"
KINDS = ("off", "light", "full", "page")
COUNTED = 63  # streams; one more runs beside them
OUTPUT_TOKENS = 16
TEMPERATURE = 0.7  # a greedy draw has fewer stages to record
SWAPPED = {"off": "light", "light": "off", "full": "page", "page": "full"}
PAGE_S = 1.0  # between two looks of an open page
# 97.5 % points of Student's distribution, by degrees of freedom (1 to 30).
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Bed(msgspec.Struct, frozen=True):
    """What is served, for how many rounds, each of `order` and back."""

    name: str
    arguments: tuple[str, ...]
    rounds: int
    order: tuple[str, ...]


BEDS = (
    Bed("model", ("--backend", "cpu", "--max-model-len", "2048"), 5, KINDS),
    Bed(
        "fake",
        ("--backend", "fake", "--max-num-seqs", "256"),
        6,
        ("off", "light", "full", "off", "light", "page"),
    ),
)


class Figure(msgspec.Struct, frozen=True):
    """Of one level."""

    tokens_per_s: float
    cpu_us_per_token: float
    cpu_us_per_request: float


class Change(msgspec.Struct, frozen=True):
    """A ratio to `off` less one, in per cent: geometric mean over rounds, and its interval."""

    per_cent: float
    low: float
    high: float
    rounds: int


def change(ratios: Sequence[float]) -> Change:
    """Of ratios of several rounds, two at least."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    student = STUDENT[min(len(logs) - 1, len(STUDENT)) - 1]
    half = student * statistics.stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.expm1(x) * 100 for x in (mean - half, mean, mean + half))
    return Change(middle, low, high, len(logs))


def ratios(rounds: Sequence[dict[str, list[Figure]]], kind: str, field: str) -> list[float]:
    """Of each round: the mean of a kind's levels over that of `off`."""

    def mean(one: dict[str, list[Figure]], of: str) -> float:
        return statistics.fmean(getattr(figure, field) for figure in one[of])

    return [mean(one, kind) / mean(one, "off") for one in rounds]


async def ask(target: Target, *, full: bool) -> None:
    """Streams like all others, one after another, until it is cancelled."""
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": "go on, and on, and on"}],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": TEMPERATURE,
        "stream": True,
    }
    headers = {"X-Headrace-Record": "full"} if full else {}
    async with client_session(target) as session:
        while True:
            path = target.url + "/v1/chat/completions"
            async with session.post(path, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content.iter_any():
                    pass


async def look(target: Target) -> None:
    """What an open page asks, until it is cancelled."""

    async def live(session: aiohttp.ClientSession) -> None:
        async with session.get(target.url + "/ui/api/live") as answer:
            assert answer.status == 200, await answer.text()
            async for _ in answer.content.iter_any():
                pass

    async with client_session(target) as session, asyncio.TaskGroup() as group:
        group.create_task(live(session))
        while True:
            for path in ("stages", "requests?limit=50"):
                async with session.get(f"{target.url}/ui/api/{path}") as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
            await asyncio.sleep(PAGE_S)


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """They run beside the block, none of them ends before it; what one raises is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
        for task in tasks:
            assert not task.done() or task.exception(), "what runs beside a level has ended"
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


class Served:
    """A server that runs, and what it takes to load it."""

    def __init__(self, server: ServeProcess, load: Workload) -> None:
        self._cpu, self._load = CpuMeter(server.process.pid), load
        self._target = Target(url=server.url, model="")

    async def prepare(self) -> None:
        """Ask it for its model, and warm it up with a level that is not counted."""
        model = await first_model(self._target)
        self._target = msgspec.structs.replace(self._target, model=model)
        await Meter(self._target, self._load).warm_up(1)
        await self.level("light", "warm")

    async def level(self, kind: str, nonce: str) -> Figure:
        """Load it once; the same requests whatever the nonce, with other words."""
        load = msgspec.structs.replace(self._load, nonce=nonce)
        works = [ask(self._target, full=kind == "full")]
        if kind == "page":
            works.append(look(self._target))
        async with beside(*works):
            before_s = self._cpu.total_s()
            level = await Meter(self._target, load).level(Shape(concurrency=COUNTED))
            spent_s = self._cpu.total_s() - before_s
        assert not (level.errors | level.sheds), level.errors | level.sheds
        return _figure(level, spent_s)


def _figure(level: Level, spent_s: float) -> Figure:
    return Figure(
        level.output_tokens_per_s,
        spent_s / level.output_tokens * 1e6,
        spent_s / level.requests * 1e6,
    )


def one_round(bed: Bed, load: Workload, number: int) -> dict[str, list[Figure]]:
    """Two new servers, all kinds there and back."""
    found: dict[str, list[Figure]] = {kind: [] for kind in KINDS}

    async def run(off: Served, on: Served) -> None:
        for served in (off, on):
            await served.prepare()
        kinds = bed.order if number % 2 else tuple(SWAPPED[kind] for kind in bed.order)
        for place, kind in enumerate((*kinds, *reversed(kinds))):
            served = off if kind == "off" else on
            found[kind].append(await served.level(kind, f"{number}/{place}"))

    with (
        ServeProcess(*bed.arguments, "--record-count", "0") as off,
        ServeProcess(*bed.arguments) as on,
    ):
        run_loop(run(Served(off, load), Served(on, load)))
    return found


def sized(bed: Bed, seconds: float) -> Workload:
    """A load whose level takes about so long here: one short level says how fast the server is."""
    load = Workload(
        requests=2 * COUNTED,
        prompt_tokens=16,
        max_tokens=OUTPUT_TOKENS,
        temperature=TEMPERATURE,
    )
    with ServeProcess(*bed.arguments) as server:
        served = Served(server, load)

        async def rate() -> float:
            await served.prepare()
            return (await served.level("light", "size")).tokens_per_s

        tokens_per_s = run_loop(rate())
    # Whole waves: a closed loop of equal answers ends with what is left of the last one.
    requests = COUNTED * max(1, round(tokens_per_s * seconds / OUTPUT_TOKENS / COUNTED))
    return msgspec.structs.replace(load, requests=requests)


async def _send_nothing(message: Any) -> None:
    return None


class _Bill:
    """As the real one after a request. Its parameters are made for the record: nobody else asks
    while there is no usage log."""

    queue_s = prefill_s = compute_s = 0.01
    _job = Job([], OUTPUT_TOKENS, sampling=Sampling(temperature=TEMPERATURE))

    def __init__(self) -> None:
        self.preempted_s: list[float] = []

    @property
    def parameters(self) -> dict[str, Any]:
        return parameters_of(self._job)

    def charged(self) -> tuple[float, str] | None:
        return None


class _Stream:
    first_token_s = last_token_s = 1.0
    cached_tokens = 0


class _Answer:
    output_tokens = reasoning_tokens = 0

    def __init__(self) -> None:
        self.finishes: list[str | None] = ["length"]


def direct_us(times: int = 20_000) -> float:
    """What a light record takes, in microseconds: the least of five loops over all its calls."""
    recorder = Recorder("model", 200, 1, offers_full=True)
    caller: Caller = Exchange("req-1", _send_nothing, None, "/v1/chat/completions")
    prompt, bill, stream, answer = [[1, 2, 3]], _Bill(), _Stream(), _Answer()

    def loop() -> None:
        for _ in range(times):
            record = recorder.open(caller, {})
            assert record is not None, "200 are kept"
            record.parsed()
            record.rendered()
            record.tokenized()
            record.submitted(prompt, 1, bill)
            record.follow(stream, answer)
            recorder.close(record, 200, "")

    return min(_timed(loop) for _ in range(5)) / times * 1e6


def _timed(work: Callable[[], None]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def measure(bed: Bed, rounds: int, seconds: float) -> dict[str, Any]:
    """All rounds of a bed, and what they add up to."""
    load = sized(bed, seconds)
    found = []
    for number in range(rounds):
        found.append(one_round(bed, load, number))
        shown = "  ".join(
            f"{kind} " + " ".join(f"{figure.tokens_per_s:.0f}" for figure in figures)
            for kind, figures in found[-1].items()
        )
        print(f"{bed.name} round {number + 1}, tokens/s: {shown}", flush=True)
    fields = "tokens_per_s", "cpu_us_per_token"
    changes = {
        kind: {field: change(ratios(found, kind, field)) for field in fields} for kind in KINDS[1:]
    }
    off = [figure for one in found for figure in one["off"]]
    request_us = statistics.fmean(figure.cpu_us_per_request for figure in off)
    for kind, by_field in changes.items():
        for field, one in by_field.items():
            interval = f"[{one.low:+.2f}, {one.high:+.2f}]"
            print(f"{bed.name} {kind:6}{field:17}{one.per_cent:+.2f} % {interval}", flush=True)
    record_us = direct_us()
    share = record_us / request_us * 100
    print(f"{bed.name} a light record: {record_us:.1f} us of {request_us:.0f}: {share:.2f} %")
    return {
        "arguments": list(bed.arguments),
        "requests_a_level": load.requests,
        "output_tokens_a_request": OUTPUT_TOKENS,
        "streams": COUNTED + 1,
        "changes": changes,
        "off_tokens_per_s": statistics.fmean(figure.tokens_per_s for figure in off),
        "off_cpu_us_per_token": statistics.fmean(figure.cpu_us_per_token for figure in off),
        "off_cpu_us_per_request": request_us,
        "direct_us": record_us,
        "direct_per_cent": share,
        "rounds": found,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, help="of each; default: 5 and 6")
    parser.add_argument(
        "--seconds", type=float, default=1.1, help="of one level, about; a wave at least"
    )
    parser.add_argument("--only", choices=[bed.name for bed in BEDS])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    began_s, load = time.monotonic(), os.getloadavg()[0]
    found: dict[str, Any] = {
        bed.name: measure(bed, args.rounds or bed.rounds, args.seconds)
        for bed in BEDS
        if args.only in (None, bed.name)
    }
    found["conditions"] = conditions(load_before=f"{load:.2f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(f"{time.monotonic() - began_s:.0f} s, written: {args.out}")


if __name__ == "__main__":
    main()

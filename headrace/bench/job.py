"""One level's share of load, run in this process: what `measure` does itself or gives workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from headrace.bench.arrivals import arrival_times_s
from headrace.bench.drive import Driver
from headrace.bench.load import HttpSend, Target, client_session
from headrace.bench.saturation import saturated
from headrace.bench.stats import Record, Shape
from headrace.bench.workload import Session, Workload

TOLD_S = 0.5  # between two words of how far it is
BEAT_S = 0.05  # how often the loop's own delay is looked at


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Share `index` of `of` equal shares of one level."""

    target: Target
    workload: Workload
    shape: Shape
    part: str
    index: int = 0
    of: int = 1
    stop_saturated: bool = False  # send nothing more once requests pile up


class Progress(msgspec.Struct, frozen=True):
    """Of one level so far."""

    sent: int
    ended: int
    failed: int
    tokens: int  # of requests that ended

    def plus(self, other: Progress) -> Progress:
        return Progress(
            self.sent + other.sent,
            self.ended + other.ended,
            self.failed + other.failed,
            self.tokens + other.tokens,
        )


class Outcome(msgspec.Struct):
    """What a job saw. Seconds on the machine's monotonic clock."""

    records: list[Record]
    unsent: int
    cores: float  # CPU seconds a second of this process
    loop_delays_s: list[float]


def sessions_of(job: Job) -> Iterator[Session]:
    """This share's sessions in order; endless when the level ends by time."""
    load, shape = job.workload, job.shape
    count: int | None = max(math.ceil(load.requests / load.asks_a_session), shape.concurrency)
    if load.trace:
        count = load.requests or None
    elif shape.duration_s is not None:
        rate = shape.rate
        count = None if rate is None else max(1, math.floor(rate * shape.duration_s))
    return itertools.islice(load.sessions(job.part, count), job.index, None, job.of)


def arrivals_of(job: Job) -> Iterator[tuple[float, Session]]:
    """(seconds after the start, session) of an open loop."""
    shape, sessions = job.shape, sessions_of(job)
    if shape.trace:
        timed = ((session.at_s or 0.0, session) for session in sessions)
        limit_s = math.inf if shape.duration_s is None else shape.duration_s
        yield from itertools.takewhile(lambda pair: pair[0] < limit_s, timed)
        return
    assert shape.rate is not None, "an open loop has a rate or a trace"
    load = job.workload
    count = math.ceil(load.requests / load.asks_a_session)
    if shape.duration_s is not None:
        count = max(1, math.floor(shape.rate * shape.duration_s))
    times_s = arrival_times_s(
        shape.rate,
        count,
        burstiness=shape.burstiness or math.inf,
        burst=shape.burst,
        key=f"{load.seed}/{job.part}/arrivals",
    )
    for session in sessions:
        if session.index >= count:
            return
        yield times_s[session.index], session


def progress_of(driver: Driver) -> Progress:
    """How far it has come: what was sent, what has ended, and what of that failed."""
    ended = [record for record in driver.records if record.end_s]
    return Progress(
        len(driver.records),
        len(ended),
        sum(not record.good for record in ended),
        sum(record.output_tokens for record in ended),
    )


async def run_job(job: Job, start_s: float, on_progress: Callable[[Progress], None]) -> Outcome:
    """Run the share from `start_s` (monotonic) on. Raises ConfigError for a trace that is wrong."""
    target, load, shape = job.target, job.workload, job.shape
    async with client_session(target) as session:
        send = HttpSend(session, target, load.path(), stream=load.stream)
        driver = Driver(send, load, target.model)
        share = shape.concurrency // job.of + (job.index < shape.concurrency % job.of)
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        wall_s, own_s = time.monotonic(), time.process_time()
        async with _watched(job, driver, on_progress) as delays_s:
            if shape.is_open:
                await driver.open(arrivals_of(job), start_s, share)
            else:
                until_s = None if shape.duration_s is None else start_s + shape.duration_s
                await driver.closed(sessions_of(job), share, until_s)
        took_s = max(time.monotonic() - wall_s, 1e-9)
        cores = (time.process_time() - own_s) / took_s
    on_progress(progress_of(driver))
    return Outcome(driver.records, driver.unsent, cores, delays_s)


@contextlib.asynccontextmanager
async def _watched(
    job: Job, driver: Driver, on_progress: Callable[[Progress], None]
) -> AsyncIterator[list[float]]:
    """Beside the load: the loop's delays, progress, and a look for saturation."""
    delays_s: list[float] = []

    async def beat() -> None:
        last_s = time.monotonic()
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(BEAT_S)
            now_s = time.monotonic()
            delays_s.append(max(0.0, now_s - before_s - BEAT_S))
            if now_s - last_s >= TOLD_S:
                last_s = now_s
                on_progress(progress_of(driver))
                if job.stop_saturated and saturated(driver.records, now_s):
                    driver.stopped.set()

    watcher = asyncio.create_task(beat())
    try:
        yield delays_s
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher

"""Level after level: warm-up, load in this process or in several, the server's side, the sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.bench.cpu import CpuMeter, measured
from headrace.bench.job import Job, Outcome, Progress, run_job
from headrace.bench.load import Target
from headrace.bench.saturation import saturated
from headrace.bench.scrape import Scraper
from headrace.bench.stats import Level, Record, Shape, achieved_per_s, level, summarise
from headrace.bench.workers import run_workers
from headrace.bench.workload import Workload
from headrace.errors import EngineError


class Meter:
    """Measures levels of one target and workload. `records` holds those of the last level.

    `pid` is the root of the server's process tree, for its CPU use; `scrape` also reads the
    server's /metrics each second; `slo_s` are limits of goodput by name, in seconds.
    """

    def __init__(
        self,
        target: Target,
        workload: Workload,
        *,
        pid: int | None = None,
        workers: int = 1,
        slo_s: Mapping[str, float] | None = None,
        scrape: bool = False,
        on_progress: Callable[[Shape, Progress], None] = lambda shape, progress: None,
    ) -> None:
        self.target, self.workload = target, workload
        self._cpu = CpuMeter(pid) if pid is not None else None
        self._workers, self._slo_s = workers, slo_s
        self._scrape = scrape
        self._on_progress = on_progress
        self.records: list[Record] = []

    async def warm_up(self, requests: int) -> None:
        """One after another, uncounted. Raises EngineError when one fails: a server that answers
        nothing is not worth a measurement."""
        plain = msgspec.structs.replace(
            self.workload, requests=requests, single="", trace="", cancel=0.0
        )
        if not requests:
            return
        job = Job(target=self.target, workload=plain, shape=Shape(concurrency=1), part="warmup")
        for record in (await run_job(job, time.monotonic(), lambda progress: None)).records:
            if record.error:
                why = record.error + (f": {record.told}" if record.told else "")
                raise EngineError(f"{self.target.url}: the warm-up request failed: {why}")

    async def level(self, shape: Shape, *, stop_saturated: bool = False) -> Level:
        """Run one level. A closed loop gets at least as many sessions as it holds at once: with
        fewer it would be another level."""
        name = "trace" if shape.trace else f"rate {shape.rate}" if shape.is_open else "level"
        job = Job(
            target=self.target,
            workload=self.workload,
            shape=shape,
            part=f"{name} {shape.concurrency}",
            stop_saturated=stop_saturated,
        )
        async with (
            measured(self._cpu) as cores,
            Scraper(self.target, on=self._scrape) as scraper,
        ):
            outcome = await self._run(job)
        self.records = outcome.records
        if not outcome.records:
            raise EngineError("no request was sent: the level ended before its first arrival")
        return level(
            outcome.records,
            shape.concurrency,
            slo_s=self._slo_s,
            server_cores=cores.server,
            client_cores=outcome.cores,
            rate=shape.rate,
            open_loop=shape.is_open,
            unsent=outcome.unsent,
            loop_delay_s=summarise(outcome.loop_delays_s),
            server=scraper.summary(),
            **self._open_figures(shape, outcome.records),
        )

    async def _run(self, job: Job) -> Outcome:
        def tell(progress: Progress) -> None:
            self._on_progress(job.shape, progress)

        workers = self._workers
        if not job.shape.is_open:
            workers = min(workers, job.shape.concurrency)
        if workers == 1:
            return await run_job(job, time.monotonic(), tell)
        return await run_workers(job, workers, tell)

    def _open_figures(self, shape: Shape, records: Sequence[Record]) -> dict[str, Any]:
        """What only an open loop has: it alone offers a rate that the server does not choose."""
        if not shape.is_open:
            return {}
        planned = [record.planned_s for record in records if record.planned_s is not None]
        begin_s, end_s = min(planned), max(record.sent_s for record in records)
        if shape.rate is not None:
            sessions_per_s: float | None = shape.rate
        else:
            span_s = max(planned) - begin_s
            sessions_per_s = len(planned) / span_s if span_s else None
        asks = self.workload.asks_a_session
        return {
            "offered_per_s": sessions_per_s and sessions_per_s * asks,
            "achieved_per_s": achieved_per_s(records, begin_s, end_s),
            "saturated": saturated(records, end_s),
        }


async def measure(
    target: Target,
    workload: Workload,
    levels: Sequence[int],
    *,
    warmup: int = 1,
    pid: int | None = None,
    on_level: Callable[[Level], None] = lambda level: None,
) -> list[Level]:
    """Closed loops of these sizes in turn, behind `warmup` uncounted requests."""
    meter = Meter(target, workload, pid=pid)
    await meter.warm_up(warmup)
    done: list[Level] = []
    for concurrency in levels:
        done.append(await meter.level(Shape(concurrency=concurrency)))
        on_level(done[-1])
    return done

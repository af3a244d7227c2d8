"""A run from its options to its report, with what a terminal shows meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.live import Live

from headrace.backends.cpu.device import cores
from headrace.bench.figure import check_installed
from headrace.bench.html import page
from headrace.bench.job import Progress
from headrace.bench.load import Target, first_model, run_loop
from headrace.bench.measure import Meter
from headrace.bench.report import (
    Report,
    RequestLines,
    conditions,
    figures,
    notes,
    save,
    table,
)
from headrace.bench.stats import FORMULAS, Level, Shape
from headrace.bench.sweep import sweep
from headrace.bench.workload import Workload


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for."""

    url: str
    model: str
    api_key: str
    timeout_s: float
    workload: Workload
    closed: tuple[int, ...]
    rates: tuple[float, ...]
    sweep: int
    open_shape: Shape
    warmup: int
    workers: int
    pid: int | None
    scrape: bool
    slo_ms: dict[str, float]
    name: str
    out: Path | None
    requests_out: Path | None
    html: Path | None
    plot: Path | None


class Screen:
    """On a terminal a table that grows with a line below it; elsewhere a line a level."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._levels: list[Level] = []
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def progress(self, shape: Shape, progress: Progress) -> None:
        if not self._console.is_terminal:
            return
        where = f"{shape.rate:.4g}/s" if shape.rate else str(shape.concurrency or "trace")
        line = (
            f"at {where}: {progress.sent} sent, {progress.sent - progress.ended} open, "
            f"{progress.failed} not answered, {progress.tokens} tokens"
        )
        self._live.update(Group(table(self._levels), line), refresh=True)

    def level(self, level: Level) -> None:
        self._levels.append(level)
        if not self._console.is_terminal:
            self._console.print(
                f"at {level.label}: {level.duration_s:.1f} s, {level.output_tokens_per_s:.1f} tok/s"
            )


def run(asked: Run) -> list[Level]:
    """Measure, print, write. Raises EngineError when the server answers nothing, ConfigError when
    the plot cannot be drawn."""
    if asked.plot:
        check_installed()
    console = Console(width=None if Console().is_terminal else 200)
    report = run_loop(_measured(asked, console))
    console.print(table(report.levels))
    for level in report.levels:
        console.print(figures(level))
        for note in notes(level):
            console.print(f"at {level.label}: {note}")
    for name, formula in FORMULAS.items():
        console.print(f"{name:>12}  {formula}", highlight=False)
    if asked.out:
        save([report], asked.out)
        console.print(f"written: {asked.out}")
    if asked.html:
        asked.html.parent.mkdir(parents=True, exist_ok=True)
        asked.html.write_text(page(report))
        console.print(f"written: {asked.html}")
    if asked.plot:
        from headrace.bench.plot import plot

        title = f"{report.name}: {report.conditions['date']}"
        plot({report.name: report.levels}, asked.plot, title=title, cores=cores())
        console.print(f"written: {asked.plot.with_suffix('.svg')} and .png")
    if asked.requests_out:
        console.print(f"written: {asked.requests_out}")
    return report.levels


async def _measured(asked: Run, console: Console) -> Report:
    target = Target(
        url=asked.url, model=asked.model, api_key=asked.api_key, timeout_s=asked.timeout_s
    )
    if not asked.model:
        target = msgspec.structs.replace(target, model=await first_model(target))
    load = asked.workload
    duration_s = asked.open_shape.duration_s
    much = f"{load.requests or 'all'} requests" if duration_s is None else f"{duration_s:g} s"
    console.print(
        f"{target.url} {target.model}: {much} a level, "
        f"{load.path()}, seed {load.seed}, nonce {load.nonce!r}"
    )
    levels: list[Level] = []
    with Screen(console) as screen, RequestLines(asked.requests_out) as lines:
        meter = Meter(
            target,
            load,
            pid=asked.pid,
            workers=asked.workers,
            slo_s={name: limit_ms / 1000 for name, limit_ms in asked.slo_ms.items()},
            scrape=asked.scrape,
            on_progress=screen.progress,
        )
        await meter.warm_up(asked.warmup)

        async def measure(shape: Shape) -> Level:
            level = await meter.level(shape, stop_saturated=asked.sweep > 0 and shape.is_open)
            levels.append(level)
            lines.write(level.label, meter.records)
            screen.level(level)
            return level

        if asked.sweep:
            most = max(asked.closed, default=load.requests)
            await sweep(measure, asked.sweep, most, asked.open_shape, load.asks_a_session)
        else:
            for shape in shapes(asked):
                await measure(shape)
    return Report(
        name=asked.name or target.model,
        url=target.url,
        model=target.model,
        workload=load,
        levels=levels,
        conditions=conditions(),
        slo_ms=asked.slo_ms,
    )


def shapes(asked: Run) -> Sequence[Shape]:
    """Closed loops, then open ones; or the trace."""
    if asked.workload.trace:
        return [msgspec.structs.replace(asked.open_shape, trace=True)]
    closed = [Shape(concurrency=n, duration_s=asked.open_shape.duration_s) for n in asked.closed]
    opened = [msgspec.structs.replace(asked.open_shape, rate=rate) for rate in asked.rates]
    return [*closed, *opened]

"""One machine, one run, one technique after another: what each is worth in tokens a second."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from headrace.bench.figure import COLOURS, drawn
from headrace.bench.load import Target, first_model, run_loop
from headrace.bench.measure import Meter
from headrace.bench.stats import Level, Shape, Summary
from headrace.bench.techniques import Fixed, Row, arguments
from headrace.bench.workload import Workload

Start = Callable[[Row], AbstractContextManager[str]]  # a server of a row -> its URL


LONG_S = 30.0  # a row whose first round took longer is not measured again


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A row and what it did. `level`: of its rounds the one with the median rate, of two the
    slower. `times_before`, `times_first`: tokens a second over those of the row with one technique
    less, None where that was not measured; and of the first."""

    name: str
    what: str
    settings: dict[str, Any]
    level: Level
    rates: list[float]  # tokens a second of each round, in their order
    times_before: float | None
    times_first: float


class Ablation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one run, for its reader."""

    model: str
    backend: str
    conditions: dict[str, str]
    workload: Workload
    concurrency: int
    rows: list[Measured]
    fixed: list[Fixed]


def measure_rows(
    rows: Sequence[Row],
    load: Workload,
    concurrency: int,
    start: Start,
    *,
    rounds: int = 1,
    on_row: Callable[[Measured], None] = lambda row: None,
) -> list[Measured]:
    """Start each row's server, load it `rounds` times (see LONG_S), stop it; all get the same
    requests. The median counts: the best of several would favour the rows that had several.

    Raises SetupError where a server does not start, EngineError where requests fail.
    """
    done: list[Measured] = []
    rates: dict[int, float] = {}
    for row in rows:
        with start(row) as url:
            levels = run_loop(_levels(url, load, concurrency, rounds))
        level = sorted(levels, key=lambda one: one.output_tokens_per_s)[(len(levels) - 1) // 2]
        rates[row.number] = rate = level.output_tokens_per_s
        before = rates.get(row.number - 1)
        first = done[0].level.output_tokens_per_s if done else rate
        measured = Measured(
            name=row.name,
            what=row.what,
            settings=row.settings,
            level=level,
            rates=[one.output_tokens_per_s for one in levels],
            times_before=None if before is None else rate / before,
            times_first=rate / first,
        )
        done.append(measured)
        on_row(measured)
    return done


async def _levels(url: str, load: Workload, concurrency: int, rounds: int) -> list[Level]:
    target = Target(url=url, model="")
    target = msgspec.structs.replace(target, model=await first_model(target))
    done: list[Level] = []
    while len(done) < rounds and (not done or done[0].duration_s < LONG_S):
        # Another nonce a round: no round finds the prompts of the one before it in the cache.
        nonce = f"{load.nonce}/{len(done)}"
        meter = Meter(target, msgspec.structs.replace(load, nonce=nonce))
        await meter.warm_up(1)
        done.append(await meter.level(Shape(concurrency=concurrency)))
    return done


def _rate(value: float) -> str:
    """Four digits, or all that are whole."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _ms(summary: Summary | None) -> str:
    return "-" if summary is None else f"{summary.p50 * 1e3:.1f}"


COLUMNS = (
    "",
    "tokens/s",
    "x before",
    "x first",
    "TTFT p50, ms",
    "ITL p50, ms",
    "cached tokens",
    "each round",
)


def cells(row: Measured) -> list[str]:
    """A row of the table; the first has no multipliers."""
    level = row.level
    failed = sum(level.errors.values())
    return [
        row.name + (f" ({failed} of {level.requests} requests failed)" if failed else ""),
        f"{level.output_tokens_per_s:.1f}",
        "-" if row.times_before is None else f"{row.times_before:.2f}",
        f"{row.times_first:.2f}",
        _ms(level.ttft_s),
        _ms(level.itl_s),
        f"{level.cached_tokens}",
        " / ".join(map(_rate, row.rates)),
    ]


def table(rows: Sequence[Measured]) -> Table:
    """For a terminal."""
    found = Table(*COLUMNS, box=None, pad_edge=False)
    for row in rows:
        found.add_row(*cells(row))
    return found


def markdown(ablation: Ablation) -> str:
    """The same for a document, with the conditions."""
    load, facts = ablation.workload, ablation.conditions
    head = (
        f"# {ablation.model}, backend {ablation.backend}: one technique after another\n\n"
        + ", ".join(f"{name} {value}" for name, value in facts.items())
        + f".\n\n{load.requests} requests a round, {ablation.concurrency} at once; prompts of "
        f"{load.prompt_tokens} tokens behind one of {load.prefixes} prefixes of "
        f"{load.prefix_tokens}; answers of {load.max_tokens} tokens, greedy; seed "
        f"{load.seed}. Of a row's rounds the median counts; one that took over {LONG_S:.0f} s was "
        "not repeated.\n\n"
    )
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in ablation.rows]
    notes = [
        f"- **{row.name}**: {row.what} (`{' '.join(arguments(row.settings))}`)"
        for row in ablation.rows
    ]
    notes += [f"- **{one.name}**: not measured; {one.why}" for one in ablation.fixed]
    return head + "\n".join([*lines, "", *notes]) + "\n"


def save(ablation: Ablation, file: Path) -> None:
    """JSON, replaced as a whole, and Markdown beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(ablation), indent=1) + b"\n")
    os.replace(part, file)
    file.with_suffix(".md").write_text(markdown(ablation))


def plot(ablation: Ablation, stem: Path) -> None:
    """A bar a row, with its multipliers, into `stem`.svg and `stem`.png.

    Raises ConfigError when matplotlib is not installed.
    """
    rows = ablation.rows
    rates = [row.level.output_tokens_per_s for row in rows]
    with drawn(stem, 9, 0.5 * len(rows) + 1.4) as figure:
        axis = figure.subplots()
        axis.patch.set_alpha(0)
        places = range(len(rows))
        axis.barh(places, rates, color=COLOURS[1], height=0.6)
        axis.set_yticks(places, [row.name for row in rows])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        for place, row, rate in zip(places, rows, rates, strict=True):
            before = "" if row.times_before is None else f"x{row.times_before:.2f}, "
            times = f"{before}x{row.times_first:.2f} in all" if place else ""
            axis.annotate(
                f" {_rate(rate)}  {times}", (rate, place), va="center", annotation_clip=False
            )
        axis.set_xlim(0, max(rates) * 1.25)
        axis.set_xlabel("output tokens / s")
        where = ablation.conditions["processor"]
        figure.suptitle(
            f"{ablation.model}, {ablation.backend}, {where}, {ablation.concurrency} requests at "
            f"once, {ablation.conditions['date']}"
        )

"""A load run's results: the JSON file, the console table, the Markdown table."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table

from headrace import __version__
from headrace.backends.cpu.device import cores
from headrace.bench.stats import Level, Summary
from headrace.bench.workload import Workload


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One server under one workload, with the conditions it was measured under."""

    name: str
    url: str
    model: str
    workload: Workload
    levels: list[Level]
    conditions: dict[str, str]


def conditions(**more: str) -> dict[str, str]:
    """Where and when, for the reader of a result: processor, cores, versions, date."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": str(cores()),
        "system": platform.system(),
        "python": platform.python_version(),
        "headrace": __version__,
        **more,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def save(reports: Sequence[Report], file: Path) -> None:
    """JSON, replaced as a whole. A figure that does not exist is null."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n")
    os.replace(part, file)


def read(file: Path) -> list[Report]:
    """What `save` wrote. Raises msgspec.ValidationError for another shape."""
    return msgspec.json.decode(file.read_bytes(), type=list[Report])


HEADINGS = (
    "at once",
    "ok",
    "errors",
    "E2E mean s",
    "E2E p99 s",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "ITL mean ms",
    "ITL p99 ms",
    "TPOT mean ms",
    "tok/s",
    "req/s",
    "cores",
)


def cells(level: Level) -> list[str]:
    """One level under `HEADINGS`."""
    errors = sum(level.errors.values())
    return [
        str(level.concurrency),
        str(level.requests - errors),
        str(errors),
        figure(level.e2e_s, "mean", 1, 2),
        figure(level.e2e_s, "p99", 1, 2),
        figure(level.ttft_s, "p50", 1e3, 0),
        figure(level.ttft_s, "p99", 1e3, 0),
        figure(level.itl_s, "mean", 1e3, 1),
        figure(level.itl_s, "p99", 1e3, 1),
        figure(level.tpot_s, "mean", 1e3, 1),
        number(level.output_tokens_per_s, 1),
        number(level.requests_per_s, 2),
        number(level.server_cores, 2),
    ]


def figure(
    of: Summary | None, name: Literal["mean", "p50", "p99"], scale: float, digits: int
) -> str:
    """One figure of a summary times `scale`; "-" when there is no summary."""
    return number(None if of is None else getattr(of, name) * scale, digits)


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(levels: Sequence[Level], title: str = "") -> Table:
    """For a terminal."""
    made = Table(title=title or None)
    for heading in HEADINGS:
        made.add_column(heading, justify="right")
    for level in levels:
        made.add_row(*cells(level))
    return made


def notes(level: Level) -> list[str]:
    """What a reader must know beyond the row: kinds of errors, counts that are not the server's."""
    lines = [f"{count} x {error}" for error, count in sorted(level.errors.items())]
    if level.counted_by_chunks:
        lines.append(
            f"{level.counted_by_chunks} answers came without usage: their tokens are chunks"
        )
    if level.client_cores is not None and level.client_cores > 0.9:
        lines.append(
            f"the load generator itself used {level.client_cores:.2f} cores: it may be the limit"
        )
    return lines


def markdown(rows: Mapping[str, Sequence[Level]], first: str = "server") -> str:
    """All servers in one table, one row a server and level."""
    lines = [
        "| " + " | ".join((first, *HEADINGS)) + " |",
        "|---|" + "---:|" * len(HEADINGS),
    ]
    for name, levels in rows.items():
        lines += ["| " + " | ".join((name, *cells(level))) + " |" for level in levels]
    return "\n".join(lines) + "\n"

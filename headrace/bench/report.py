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
from headrace.bench.stats import Level, Record, Summary, e2e_s, tpot_s, ttft_s
from headrace.bench.workload import Workload

Statistic = Literal["mean", "p50", "p90", "p99", "max"]
STATISTICS: tuple[Statistic, ...] = ("mean", "p50", "p90", "p99", "max")

# Name in FORMULAS, field of Level, unit, seconds to unit.
TIMES: tuple[tuple[str, str, str, float], ...] = (
    ("TTFT", "ttft_s", "ms", 1e3),
    ("TTFC", "ttfc_s", "ms", 1e3),
    ("ITL", "itl_s", "ms", 1e3),
    ("ICL", "icl_s", "ms", 1e3),
    ("TPOT", "tpot_s", "ms", 1e3),
    ("normalised", "normalised_s", "ms/token", 1e3),
    ("E2E", "e2e_s", "s", 1.0),
    ("lag", "lag_s", "ms", 1e3),
)
# Name in FORMULAS, field of Level.
RATES: tuple[tuple[str, str], ...] = (
    ("tok/s", "output_tokens_per_s"),
    ("steady tok/s", "steady_tokens_per_s"),
    ("req/s", "requests_per_s"),
    ("offered", "offered_per_s"),
    ("achieved", "achieved_per_s"),
    ("goodput", "goodput_per_s"),
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One server under one workload, with the conditions it was measured under."""

    name: str
    url: str
    model: str
    workload: Workload
    levels: list[Level]
    conditions: dict[str, str]
    slo_ms: dict[str, float] = {}


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


class RequestLines:
    """`with RequestLines(file) as lines:` writes a JSON object a request; None writes nothing."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def __enter__(self) -> RequestLines:
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._out = self._file.open("wb")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file:
            self._out.close()

    def write(self, label: str, records: Sequence[Record]) -> None:
        """All requests of the level `label`. Times as in `Record`, with what they add up to."""
        if not self._file:
            return
        for record in records:
            line = {
                "level": label,
                "ttft_s": ttft_s(record),
                "tpot_s": tpot_s(record),
                "e2e_s": e2e_s(record),
                **msgspec.to_builtins(record),
            }
            self._out.write(msgspec.json.encode(line) + b"\n")
        self._out.flush()


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
    """One level under `HEADINGS`; sheds are errors here, and apart in `notes`."""
    errors = sum(level.errors.values()) + sum(level.sheds.values())
    return [
        level.label,
        str(level.requests - errors - level.cancelled),
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


def figure(of: Summary | None, name: Statistic, scale: float, digits: int) -> str:
    """One figure of a summary times `scale`; "-" when there is none."""
    value = None if of is None else getattr(of, name)
    return number(None if value is None else value * scale, digits)


def number(value: float | None, digits: int) -> str:
    """With so many digits behind the point; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(levels: Sequence[Level], title: str = "") -> Table:
    """For a terminal: one row a level."""
    rates = [(name, field) for name, field in RATES[3:] if any(getattr(x, field) for x in levels)]
    made = Table(title=title or None)
    for heading in (*HEADINGS, *(f"{name} /s" for name, _ in rates)):
        made.add_column(heading, justify="right")
    for level in levels:
        made.add_row(*cells(level), *(number(getattr(level, field), 2) for _, field in rates))
    return made


def figures(level: Level) -> Table:
    """For a terminal: every time of one level, with mean, percentiles and the count."""
    made = Table(title=f"at {level.label}", title_justify="left")
    for heading in ("", "unit", *STATISTICS, "values"):
        made.add_column(heading, justify="right")
    for name, field, unit, scale in TIMES:
        of: Summary | None = getattr(level, field)
        if of is not None:
            values = [figure(of, statistic, scale, 3) for statistic in STATISTICS]
            made.add_row(name, unit, *values, str(of.count))
    return made


BUSY_CORES, LATE_S = 0.9, 0.02  # above these the generator's own figures are in doubt


def bottleneck(level: Level) -> list[str]:
    """Why the load generator itself may have been the limit of this level; empty if it was not."""
    lines = []
    if level.client_cores is not None and level.client_cores > BUSY_CORES:
        lines.append(f"used {level.client_cores:.2f} cores")
    if level.loop_delay_s is not None and level.loop_delay_s.p99 > LATE_S:
        lines.append(f"saw chunks up to {level.loop_delay_s.p99 * 1e3:.0f} ms late (p99)")
    if level.lag_s is not None and not level.concurrency and level.lag_s.p99 > LATE_S:
        lines.append(f"sent requests {level.lag_s.p99 * 1e3:.0f} ms late (p99)")
    return lines


def notes(level: Level) -> list[str]:
    """What a reader must know beyond the row: kinds of errors, counts that are not the server's."""
    lines = [f"{count} x {error}" for error, count in sorted(level.errors.items())]
    lines += [f"{count} x shed, {error}" for error, count in sorted(level.sheds.items())]
    if level.cancelled:
        lines.append(f"{level.cancelled} dropped by the client, as asked")
    if level.unsent:
        lines.append(f"{level.unsent} not sent: an earlier request of their session had failed")
    if level.good_share is not None:
        lines.append(f"{level.good_share:.1%} of the requests kept every limit")
    if level.counted_by_chunks:
        lines.append(
            f"{level.counted_by_chunks} answers came without usage: their tokens are chunks"
        )
    if level.cached_tokens:
        share = level.cached_tokens / level.prompt_tokens
        lines.append(f"{level.cached_tokens} prompt tokens from the cache ({share:.1%})")
    if level.saturated:
        lines.append("over-saturated: requests came faster than they were served")
    if why := bottleneck(level):
        lines.append(f"the load generator itself may be the limit: it {' and '.join(why)}")
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

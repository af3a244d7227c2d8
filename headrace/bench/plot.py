"""Four panels against the load: latency, inter-token latency, throughput, CPU use.

The load is the number of sessions at once; where a level was an open loop, requests a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.figure import COLOURS, drawn
from headrace.bench.stats import Level, Summary


def _mean(of: Summary | None, scale: float) -> float | None:
    return None if of is None else of.mean * scale


Panel = tuple[str, str, Callable[[Level], float | None]]  # title, unit, value
LATENCY: Panel = ("End-to-end latency, mean", "seconds", lambda x: _mean(x.e2e_s, 1))
GAP: Panel = ("Inter-token latency, mean", "milliseconds", lambda x: _mean(x.itl_s, 1e3))
RATE: Panel = ("Throughput", "output tokens / s", lambda x: x.output_tokens_per_s)


def _by_rate(series: Mapping[str, Sequence[Level]]) -> bool:
    return any(level.open_loop for levels in series.values() for level in levels)


def _points(
    series: Mapping[str, Sequence[Level]],
    levels: Sequence[Level],
    value: Callable[[Level], float | None],
) -> tuple[list[float], list[float]]:
    """Columns x and y of the levels that have a value, in the order of x."""
    by_rate = _by_rate(series)
    points = sorted(
        (x.requests_per_s if by_rate else x.concurrency, y)
        for x in levels
        if (y := value(x)) is not None
    )
    return [x for x, _ in points], [y for _, y in points]


def plot(series: Mapping[str, Sequence[Level]], stem: Path, *, title: str, cores: int) -> None:
    """Write `stem`.svg and `stem`.png. `cores` is what 100 % CPU means.

    Raises ConfigError when matplotlib is not installed.
    """
    assert len(series) <= len(COLOURS), "a line without a colour of its own would be left out"
    with drawn(stem, 10, 7) as figure:
        axes = figure.subplots(2, 2)
        _lines(axes[0][0], series, LATENCY, log=True)
        _lines(axes[0][1], series, GAP, log=True)
        _lines(axes[1][0], series, RATE, log=False)
        _cpu(axes[1][1], series, cores)
        figure.suptitle(title)
        handles, names = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)


def _lines(axis: Any, series: Mapping[str, Sequence[Level]], panel: Panel, *, log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    title, unit, value = panel
    for colour, (name, levels) in zip(COLOURS, series.items(), strict=False):
        axis.plot(
            *_points(series, levels, value), marker="o", markersize=4, color=colour, label=name
        )
    _frame(axis, series, title, unit)
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        axis.set_ylim(bottom=0)


def _cpu(axis: Any, series: Mapping[str, Sequence[Level]], cores: int) -> None:
    """Solid: share of the machine's cores that the server used. Dashed: requests in flight."""

    def used(level: Level) -> float | None:
        return None if level.server_cores is None else level.server_cores / cores * 100

    flight = axis.twinx()
    for colour, (_, levels) in zip(COLOURS, series.items(), strict=False):
        axis.plot(*_points(series, levels, used), marker="o", markersize=4, color=colour)
        open_ = _points(series, levels, lambda x: x.in_flight)
        flight.plot(*open_, linestyle="--", linewidth=1, color=colour)
    _frame(axis, series, "Server CPU (solid), requests in flight (dashed)", f"% of {cores} cores")
    axis.set_ylim(0, 105)
    flight.set_ylabel("requests in flight, mean")
    flight.set_ylim(bottom=0)
    flight.grid(visible=False)


def _frame(axis: Any, series: Mapping[str, Sequence[Level]], title: str, unit: str) -> None:
    ticks = sorted({x.concurrency for levels in series.values() for x in levels})
    axis.patch.set_alpha(0)
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(unit)
    if _by_rate(series):
        axis.set_xlabel("requests answered a second")
        axis.set_xlim(left=0)
        return
    axis.set_xlabel("requests at once")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()

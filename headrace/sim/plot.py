"""Mean TTFT against load, a panel for each cache pressure, a line for each policy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from headrace.bench.figure import COLOURS, check_installed, drawn
from headrace.errors import ConfigError
from headrace.sim.sweep import Point


def check_plot(policies: Collection[str]) -> None:
    """Raises ConfigError when these cannot be drawn: for who will draw after long work."""
    check_installed()
    if len(policies) > len(COLOURS):
        raise ConfigError(
            f"a plot shows at most {len(COLOURS)} policies, and here are {len(policies)}",
            param="plot",
        )


def plot(points: Sequence[Point], stem: Path, *, title: str) -> None:
    """Write `stem`.svg and `stem`.png. Raises ConfigError when matplotlib is not installed, or
    when there are more policies than colours.
    """
    policies = list(dict.fromkeys(point.outcome.policy for point in points))
    pressures = list(dict.fromkeys(point.pressure for point in points))
    check_plot(policies)
    with drawn(stem, 4 * len(pressures) + 1, 4) as figure:
        axes = figure.subplots(1, len(pressures), squeeze=False, sharey=True)[0]
        for axis, pressure in zip(axes, pressures, strict=True):
            for colour, policy in zip(COLOURS, policies, strict=False):
                line = [
                    (p.load, p.outcome.ttft_s.mean)
                    for p in points
                    if p.pressure == pressure and p.outcome.policy == policy
                ]
                xs, ys = [x for x, _ in line], [y for _, y in line]
                axis.plot(xs, ys, marker="o", markersize=4, color=colour, label=policy)
            axis.patch.set_alpha(0)
            axis.set_yscale("log")
            axis.set_title(f"working set / cache = {pressure:.2f}", fontsize=10)
            axis.set_xlabel("load: prompts' time uncached / fleet's time")
        axes[0].set_ylabel("TTFT, mean, seconds")
        figure.suptitle(title)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)

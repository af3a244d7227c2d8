"""Policies against load and cache pressure: many runs, one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from headrace.bench.report import conditions
from headrace.gateway.view import Knobs
from headrace.sim.run import Fleet, Outcome, simulate
from headrace.sim.workload import Workload


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep."""

    workload: str
    speed: float  # arrivals, times the workload's own
    load: float  # prompts' time if nothing is cached, as a share of the fleet's time
    pressure: float  # working set over the fleet's cache
    kv_blocks: int  # of one worker
    outcome: Outcome


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace sim` writes: runs, and all that it takes to repeat them."""

    fleet: Fleet
    knobs: Knobs
    requests: int
    block_tokens: int
    seed: int
    conditions: Mapping[str, str]
    points: tuple[Point, ...]

    @staticmethod
    def of(
        workload: Workload, fleet: Fleet, knobs: Knobs, seed: int, points: tuple[Point, ...]
    ) -> Study:
        """Those runs, with the conditions of this machine."""
        return Study(
            fleet=fleet,
            knobs=knobs,
            requests=len(workload.requests),
            block_tokens=workload.block_tokens,
            seed=seed,
            conditions=conditions(),
            points=points,
        )

    @property
    def title(self) -> str:
        """What ran where, in a line."""
        names = ", ".join(dict.fromkeys(point.workload for point in self.points))
        return (
            f"{names}: {self.requests} requests, {self.fleet.workers} x {self.fleet.device.name}, "
            f"{self.conditions['date'][:10]}"
        )


def own_load(workload: Workload, fleet: Fleet) -> float:
    """Seconds that all prompts take uncached, over the seconds the fleet has until the last
    arrival; 0 = all arrive at once.
    """
    if not workload.duration_s:
        return 0.0
    return fleet.device.prompts_s(workload) / (fleet.workers * workload.duration_s)


def sweep(
    workload: Workload,
    fleet: Fleet,
    policies: Sequence[str],
    speeds: Sequence[float],
    pressures: Sequence[float],
    *,
    knobs: Knobs,
    seed: int,
) -> tuple[Point, ...]:
    """A run for each policy, speed and pressure; no pressures = the fleet's own cache."""
    points = []
    for pressure in pressures or (0.0,):
        at = fleet.under_pressure(workload, pressure) if pressure else fleet
        blocks = at.blocks(workload)
        real = workload.working_set_blocks() / (blocks * at.workers)
        for speed in speeds:
            asked = workload.faster(speed)
            for policy in policies:
                point = Point(
                    workload=workload.name,
                    speed=speed,
                    load=own_load(asked, at),
                    pressure=real,
                    kv_blocks=blocks,
                    outcome=simulate(asked, at, policy, knobs=knobs, seed=seed),
                )
                points.append(point)
    return tuple(points)


HEADINGS: tuple[str, ...] = (
    *("load", "pressure", "policy", "TTFT mean s", "p50", "p90", "p99", "TPOT mean ms"),
    *("hits", "of ideal", "imbalance", "preempted", "CPU s"),
)


def cells(point: Point) -> tuple[str, ...]:
    """One run under `HEADINGS`."""
    out = point.outcome
    return (
        f"{point.load:.2f}",
        f"{point.pressure:.2f}",
        out.policy,
        f"{out.ttft_s.mean:.3f}",
        f"{out.ttft_s.p50:.3f}",
        f"{out.ttft_s.p90:.2f}",
        f"{out.ttft_s.p99:.2f}",
        "-" if out.tpot_s is None else f"{out.tpot_s.mean * 1e3:.1f}",
        f"{out.hit_share:.1%}",
        f"{out.of_ideal:.1%}",
        f"{out.imbalance:.2f}",
        str(out.preemptions),
        f"{out.cpu_s:.1f}",
    )


def table(points: Sequence[Point]) -> Table:
    """For a console."""
    shown = Table(*HEADINGS, box=None)
    for column in shown.columns:
        column.justify = "left" if column.header == "policy" else "right"
    for point in points:
        shown.add_row(*cells(point))
    return shown


def markdown(study: Study) -> str:
    """For a page."""
    lines = [f"# {study.title}", "", "| " + " | ".join(HEADINGS) + " |"]
    lines.append("|" + "|".join("---" if h == "policy" else "---:" for h in HEADINGS) + "|")
    lines += ["| " + " | ".join(cells(point)) + " |" for point in study.points]
    return "\n".join(lines) + "\n"


def save(study: Study, file: Path) -> None:
    """JSON, one file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(study), indent=1) + b"\n")

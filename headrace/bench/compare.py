"""Two reports side by side: what changed, level by level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from rich.table import Table

from headrace.bench.report import Report, number
from headrace.bench.stats import Level, Summary


def _of(field: str, statistic: str) -> Callable[[Level], float | None]:
    def value(level: Level) -> float | None:
        of: Summary | None = getattr(level, field)
        return None if of is None else getattr(of, statistic)

    return value


class Figure(msgspec.Struct, frozen=True):
    """One row: its name with the unit, how to read it, whether more of it is better."""

    name: str
    value: Callable[[Level], float | None]
    scale: float
    more_is_better: bool


FIGURES = (
    Figure("tok/s", lambda x: x.output_tokens_per_s, 1, True),
    Figure("req/s", lambda x: x.requests_per_s, 1, True),
    Figure("goodput/s", lambda x: x.goodput_per_s, 1, True),
    Figure("TTFT p50 ms", _of("ttft_s", "p50"), 1e3, False),
    Figure("TTFT p99 ms", _of("ttft_s", "p99"), 1e3, False),
    Figure("ITL mean ms", _of("itl_s", "mean"), 1e3, False),
    Figure("ITL p99 ms", _of("itl_s", "p99"), 1e3, False),
    Figure("TPOT mean ms", _of("tpot_s", "mean"), 1e3, False),
    Figure("E2E mean s", _of("e2e_s", "mean"), 1, False),
    Figure("E2E p99 s", _of("e2e_s", "p99"), 1, False),
    Figure("errors", lambda x: float(sum(x.errors.values())), 1, False),
    Figure("sheds", lambda x: float(sum(x.sheds.values())), 1, False),
)


class Row(msgspec.Struct, frozen=True):
    """One figure of one level in both reports. `change` is (b - a) / a, None where a is 0."""

    level: str
    figure: str
    a: float
    b: float
    change: float | None
    better: bool | None  # None: equal


def rows(a: Sequence[Level], b: Sequence[Level]) -> Iterator[Row]:
    """Levels that both have, by their label; figures that both have and that are not 0 in both."""
    others = {level.label: level for level in b}
    for one in a:
        two = others.get(one.label)
        if two is None:
            continue
        for figure in FIGURES:
            before, after = figure.value(one), figure.value(two)
            if before is None or after is None or before == after == 0:
                continue
            yield Row(
                one.label,
                figure.name,
                before * figure.scale,
                after * figure.scale,
                (after - before) / before if before else None,
                None if after == before else (after > before) == figure.more_is_better,
            )


def differences(a: Report, b: Report) -> list[str]:
    """Why the two may not be comparable: what was asked and where, field by field."""
    lines = []
    for name, one, two in [
        *((name, getattr(a, name), getattr(b, name)) for name in ("model", "slo_ms")),
        *(
            (name, getattr(a.workload, name), getattr(b.workload, name))
            for name in a.workload.__struct_fields__
            if name != "nonce"
        ),
        *(
            (name, a.conditions.get(name, ""), b.conditions.get(name, ""))
            for name in a.conditions | b.conditions
            if name != "date"
        ),
    ]:
        if one != two:
            lines.append(f"{name}: {one!r} and {two!r}")
    labels = [{level.label for level in report.levels} for report in (a, b)]
    lines += [f"at {label}: only in the first" for label in sorted(labels[0] - labels[1])]
    lines += [f"at {label}: only in the second" for label in sorted(labels[1] - labels[0])]
    return lines


def compared(a: Report, b: Report, first: str, second: str) -> Table:
    """For a terminal. A change is one run against one run: it says nothing about chance."""
    made = Table()
    for heading in ("at", "figure", first, second, "change", ""):
        made.add_column(heading, justify="right")
    last = ""
    for row in rows(a.levels, b.levels):
        change = "-" if row.change is None else f"{row.change:+.1%}"
        word = {None: "", True: "better", False: "worse"}[row.better]
        label = row.level if row.level != last else ""
        made.add_row(label, row.figure, number(row.a, 3), number(row.b, 3), change, word)
        last = row.level
    return made

"""A report as one HTML file: no scripts, no fonts, nothing fetched; its charts are inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import jinja2

from headrace.bench.report import (
    RATES,
    STATISTICS,
    TIMES,
    Report,
    figure,
    notes,
    number,
)
from headrace.bench.stats import FORMULAS, Level, Summary

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 250, 58, 40, 28
Line = tuple[str, list[tuple[float, float]]]  # name, points

PAGE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ report.name }}: load report</title>
<style>
:root { color-scheme: light dark; --ink: #1f2328; --dim: #656d76; --line: #d0d7de; --back: #fff;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #8d96a0; --line: #30363d;
  --back: #0d1117; --c0: #58a6ff; --c1: #f0883e; --c2: #3fb950; --c3: #bc8cff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
caption { text-align: left; font-weight: 600; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
svg text { fill: var(--dim); font-size: 11px; } svg .title { fill: var(--ink); font-size: 13px; }
svg .axis { stroke: var(--line); } svg polyline { fill: none; stroke-width: 2; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.5rem; }
.warn { border-left: 4px solid var(--c1); padding-left: .6rem; }
</style></head><body>
<h1>{{ report.name }}</h1>
<p>{{ report.url }}, model {{ report.model }}, {{ report.conditions.get("date", "") }}</p>
<div class="charts">{% for chart in charts %}{{ chart | safe }}{% endfor %}</div>
<h2>Levels</h2>
<table><thead><tr><th scope="col">at</th><th scope="col">requests</th><th scope="col">good</th>
<th scope="col">errors</th><th scope="col">shed</th><th scope="col">dropped</th>
{% for name in rates %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for level in report.levels %}<tr><th scope="row">{{ level.label }}</th>
{% for cell in counts(level) %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody></table>
{% for level in report.levels %}
<h3>At {{ level.label }}</h3>
{% for note in notes(level) %}<p class="warn">{{ note }}</p>{% endfor %}
<table><thead><tr><th scope="col">time</th><th scope="col">unit</th>
{% for name in statistics %}<th scope="col">{{ name }}</th>{% endfor %}
<th scope="col">values</th></tr></thead><tbody>
{% for row in times(level) %}<tr><th scope="row">{{ row[0] }}</th>
{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody></table>
{% if level.server %}<details><summary>The server's own metrics</summary><table>
<thead><tr><th scope="col">series</th><th scope="col">kind</th>
<th scope="col">mean, or growth a second</th><th scope="col">maximum, or growth</th></tr></thead>
<tbody>{% for name, metric in level.server | dictsort %}<tr><th scope="row">{{ name }}</th>
<td>{{ metric.kind }}</td><td>{{ "%.4g" | format(metric.mean) }}</td>
<td>{{ "%.6g" | format(metric.max) }}</td></tr>{% endfor %}</tbody></table></details>{% endif %}
{% endfor %}
<h2>Formulas</h2>
<dl>{% for name, formula in formulas.items() %}<dt>{{ name }}</dt><dd>{{ formula }}</dd>{% endfor %}
</dl>
<h2>Conditions</h2>
<table><tbody>{% for name, value in conditions %}<tr><th scope="row">{{ name }}</th>
<td>{{ value }}</td></tr>{% endfor %}</tbody></table>
</body></html>
"""
)


def page(report: Report) -> str:
    """The whole file."""
    shown = [(name, field) for name, field in RATES if _any(report.levels, field)]

    def counts(level: Level) -> list[str]:
        errors, sheds = sum(level.errors.values()), sum(level.sheds.values())
        good = level.requests - errors - sheds - level.cancelled
        whole = [level.requests, good, errors, sheds, level.cancelled]
        return [*map(str, whole), *(number(getattr(level, field), 2) for _, field in shown)]

    def times(level: Level) -> list[list[str]]:
        found = []
        for name, field, unit, scale in TIMES:
            of: Summary | None = getattr(level, field)
            if of is not None:
                values = [figure(of, statistic, scale, 3) for statistic in STATISTICS]
                found.append([name, unit, *values, str(of.count)])
        return found

    asked = report.workload
    fields = [(name, getattr(asked, name)) for name in asked.__struct_fields__]
    return PAGE.render(
        report=report,
        charts=charts(report.levels),
        rates=[name for name, _ in shown],
        counts=counts,
        times=times,
        notes=notes,
        statistics=STATISTICS,
        formulas=FORMULAS,
        conditions=[*report.conditions.items(), *fields, ("limits, ms", report.slo_ms or "none")],
    )


def _any(levels: Sequence[Level], field: str) -> bool:
    return any(getattr(level, field) is not None for level in levels)


def charts(levels: Sequence[Level]) -> list[str]:
    """Latency and throughput against what was achieved, and goodput where limits were given."""

    def of(field: str, statistic: str, scale: float) -> Line:
        points = [
            (level.requests_per_s, getattr(summary, statistic) * scale)
            for level in levels
            if (summary := getattr(level, field)) is not None
        ]
        return statistic, points

    made = [
        chart("TTFT", "ms", [of("ttft_s", name, 1e3) for name in ("p50", "p90", "p99")]),
        chart("ITL", "ms", [of("itl_s", name, 1e3) for name in ("mean", "p99")]),
        chart("E2E", "s", [of("e2e_s", name, 1.0) for name in ("p50", "p90", "p99")]),
        chart(
            "Throughput",
            "output tok/s",
            [("tok/s", [(x.requests_per_s, x.output_tokens_per_s) for x in levels])],
        ),
    ]
    good = [(x.requests_per_s, x.good_share * 100) for x in levels if x.good_share is not None]
    return [*made, chart("Within every limit", "%", [("share", good)])] if good else made


def chart(title: str, unit: str, lines: Sequence[Line]) -> str:
    """SVG of lines over req/s, both axes from 0; points in the order of x."""
    lines = [(name, sorted(points)) for name, points in lines if points]
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points]
    x_most, y_most = _nice(max(xs, default=1)), _nice(max(ys, default=1))
    wide, high = WIDTH - LEFT - 10, HEIGHT - BOTTOM - TOP

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x_most * wide, TOP + high - y / y_most * high

    parts = [
        f'<svg role="img" aria-label="{html.escape(title)} in {html.escape(unit)} over requests '
        f'a second" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<text class="title" x="{LEFT}" y="16">{html.escape(title)}, {html.escape(unit)}</text>',
    ]
    for step in range(5):
        x, y = x_most * step / 4, y_most * step / 4
        (px, _), (_, py) = at(x, 0), at(0, y)
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 10}" y1="{py:.1f}" y2="{py:.1f}"/>'
            f'<text x="{LEFT - 5}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>'
            f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
        )
    for number_, (name, points) in enumerate(lines):
        colour = f"var(--c{number_})"
        placed = [at(x, y) for x, y in points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{joined}" style="stroke: {colour}"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill: {colour}"/>' for x, y in placed
        ]
        right = WIDTH - 10 - 48 * (len(lines) - 1 - number_)
        parts.append(
            f'<text x="{right}" y="16" text-anchor="end" style="fill: {colour}">'
            f"{html.escape(name)}</text>"
        )
    parts.append(f'<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end">req/s</text></svg>')
    return "".join(parts)


def _nice(most: float) -> float:
    """The least of 1, 2, 4, 5, 8, 10 times a power of ten that is not below `most`."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= most * (1 - 1e-9))

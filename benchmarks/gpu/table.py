"""Rows of all engines as one table: rates, fractions of the card's limit, ratios, what is asked.

    python -m benchmarks.gpu.table ROWS.jsonl [--out benchmarks/results]

Writes gpu-CARD-DATE.json and .md. A row that comes twice counts as it came last. `ratio` is
headrace over vLLM where more is better, vLLM over headrace where less is: over 1 is always a win.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.work import ALL, LISTS, Work

RESULTS = Path(__file__).parent.parent / "results"
OURS, PEER = "headrace", "vllm"
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Line:
    """One figure of the table. `met`: None where nothing is asked or a figure is missing."""

    work: str
    figure: str
    ours: float | None
    peer: float | None
    other: float | None  # transformers
    fraction: float | None  # of the card's limit, ours
    peer_fraction: float | None
    ratio: float | None
    must: str
    met: bool | None


class Rows:
    """The rows of a run, found by engine and work."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.all = list(rows)
        self._found = {
            (row["engine"], row["work"]): row
            for row in self.all
            if "work" in row and "engine" in row and "failed" not in row
        }

    def get(self, engine: str, work: str, figure: str) -> float | None:
        """One figure, None if there is none."""
        value = self._found.get((engine, work), {}).get(figure)
        return None if value is None else float(value)

    def gaps(self) -> list[str]:
        """What did not run, in words."""
        lines = []
        for row in self.all:
            who = row.get("engine", "?")
            if "failed" in row:
                lines.append(f"{who}: {row.get('work', 'all of it')} failed: {row['failed']}")
            if "skipped" in row:
                lines.append(f"{who}: not run: {', '.join(row['skipped'])} ({row['reason']})")
        return lines


def read_rows(file: Path) -> Rows:
    """Raises ValueError for a line that is no JSON."""
    return Rows(json.loads(line) for line in file.read_text().splitlines() if line)


def lines(rows: Rows) -> list[Line]:
    """Every figure that some engine has, in the order of the works."""
    found = [*_starts(rows), *_works(rows), *_levels(rows), *_streams(rows)]
    return [
        line for line in found if any(v is not None for v in (line.ours, line.peer, line.other))
    ]


def _line(
    rows: Rows,
    work: str,
    figure: str,
    must: str = "",
    test: Callable[[float, float], bool] | None = None,
    *,
    more: bool = True,
) -> Line:
    """`test(ours, ratio)`: whether `must` is met; the ratio is NaN without the peer's figure."""
    ours, peer = rows.get(OURS, work, figure), rows.get(PEER, work, figure)
    ratio = None
    if ours and peer:
        ratio = ours / peer if more else peer / ours
    met = None
    if test is not None and ours is not None:
        missing = math.nan if ratio is None else ratio
        met = test(ours, missing)
        if ratio is None and test(ours, math.inf) is not test(ours, 0.0):
            met = None  # it hangs on the peer's figure, which is not there
    return Line(
        work,
        figure,
        ours,
        peer,
        rows.get("transformers", work, figure),
        rows.get(OURS, work, "fraction"),
        rows.get(PEER, work, "fraction"),
        ratio,
        must,
        met,
    )


def _starts(rows: Rows) -> list[Line]:
    def at_least(factor: float) -> Callable[[float, float], bool]:
        return lambda ours, ratio: ratio >= factor

    return [
        _line(rows, "start cold", "seconds", "ratio >= 4", at_least(4.0), more=False),
        _line(rows, "start warm", "seconds", "ratio >= 5", at_least(5.0), more=False),
        _line(rows, "http ready", "seconds", more=False),
    ]


def _works(rows: Rows) -> list[Line]:
    found = []
    mixture = any("experts_hit" in row for row in rows.all)
    for work in (*ALL, *LISTS["small"]):
        must, test = "", None
        least, aim = (_of_mixture(work), 0.0) if mixture else (work.must, work.aim)
        if least:
            more = f", aim {aim:.2f}" if aim else ""
            must, test = f"ratio >= {least:.2f}{more}", _reaches(least)
        found.append(_line(rows, work.name, "tok_s", must, test))
    return found


def _of_mixture(work: Work) -> float:
    """Least ratio: vLLM's kernels of mixtures leave more than those of dense models."""
    few = work.kind == "wave" and work.requests <= 64
    return (1.2 if few else 1.0) if work.must else 0.0


def _reaches(least: float) -> Callable[[float, float], bool]:
    return lambda ours, ratio: ratio >= least


def _levels(rows: Rows) -> list[Line]:
    """HTTP levels; 64 and 256 streams against our own offline rate."""
    found = []
    names = sorted(
        {row["work"] for row in rows.all if re.fullmatch(r"http \d+ streams", row.get("work", ""))},
        key=lambda name: int(name.split()[1]),
    )
    for name in names:
        streams = name.split()[1]
        must, test = "", None
        offline = rows.get(OURS, f"wave {streams}x(64->75)", "tok_s")
        if streams in ("64", "256") and offline:
            must = f">= 0.97 of offline ({offline:.0f})"
            test = _not_below(0.97 * offline)
        found.append(_line(rows, name, "tok_s", must, test))
        found.append(_line(rows, name, "itl_p50_ms", more=False))
        found.append(_line(rows, name, "itl_p99_ms", more=False))
        found.append(_line(rows, name, "ttft_p50_ms", more=False))
    return found


def _not_below(least: float) -> Callable[[float, float], bool]:
    return lambda ours, ratio: ours >= least


def _streams(rows: Rows) -> list[Line]:
    return [
        _line(rows, "http quiet", "itl_p50_ms", more=False),
        _line(rows, "http quiet", "itl_p99_ms", more=False),
        _line(rows, "http storm", "itl_p50_ms", more=False),
        _line(
            rows,
            "http storm",
            "itl_p99_ms",
            "<= 45 ms, aim 35",
            lambda ours, ratio: ours <= 45.0,
            more=False,
        ),
        _line(
            rows,
            "http storm",
            "storm_ttft_p50_ms",
            "<= 1.15x vLLM's",
            lambda ours, ratio: ratio >= 1 / 1.15,
            more=False,
        ),
        _line(rows, "http reuse", "cold_ttft_ms", more=False),
        _line(
            rows,
            "http reuse",
            "warm_ttft_p50_ms",
            "<= vLLM's, aim 20 ms",
            lambda ours, ratio: ratio >= 1.0,
            more=False,
        ),
    ]


def facts(rows: Rows) -> dict[str, str]:
    """Card, versions, date."""
    known: dict[str, str] = {}
    for row in rows.all:
        told = [key for key in ("card", "python", "torch", "triton", "shape") if key in row]
        known |= {key: str(row[key]) for key in told}
        known |= {
            key.removesuffix("_s"): f"{row[key]:.3g}/s" for key in row if key.startswith("limit_")
            and key != "limit_s"
        }  # fmt: skip
        if "version" in row:
            known[str(row["engine"])] = str(row["version"])
    return known | {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")}


def markdown(known: Mapping[str, str], made: Sequence[Line], gaps: Sequence[str]) -> str:
    """The table, with facts before and gaps behind it."""
    title = f"{known.get('shape', '?')} on {known.get('card', '?')}, {known['date']}"
    out = [f"# {title}", "", ", ".join(f"{key} {value}" for key, value in known.items()), ""]
    heads = [
        "work",
        "figure",
        OURS,
        "of limit",
        "vLLM",
        "of limit",
        "transformers",
        "ratio",
        "must",
        "",
    ]
    out += ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * 6 + "---|---|"]
    for line in made:
        cells = [
            line.work,
            line.figure,
            number(line.ours),
            share(line.fraction if line.figure == "tok_s" else None),
            number(line.peer),
            share(line.peer_fraction if line.figure == "tok_s" else None),
            number(line.other),
            "-" if line.ratio is None else f"{line.ratio:.3f}",
            line.must,
            {None: "", True: "met", False: "**missed**"}[line.met],
        ]
        out.append("| " + " | ".join(cells) + " |")
    out += ["", *(f"- {gap}" for gap in gaps)] if gaps else []
    return "\n".join(out) + "\n"


def number(value: float | None) -> str:
    """Four digits or so."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def stem(known: Mapping[str, str]) -> str:
    """`gpu-h100-80gb-hbm3-2026-01-31`."""
    card = re.sub(r"[^a-z0-9]+", "-", known.get("card", "unknown").lower().replace("nvidia", ""))
    return f"gpu-{card.strip('-')}-{known['date']}"


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(file: Path, out: Path) -> None:
    """Write and print the table of the rows in FILE."""
    rows = read_rows(file)
    known, made = facts(rows), lines(rows)
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(known, made, rows.gaps())
    (out / f"{stem(known)}.md").write_text(text)
    whole = {"facts": known, "lines": [dataclasses.asdict(line) for line in made], "rows": rows.all}
    (out / f"{stem(known)}.json").write_text(json.dumps(whole, indent=1) + "\n")
    click.echo(text)


if __name__ == "__main__":
    main()

"""The results of a run on this processor as Markdown and a plot.

    python -m benchmarks.cpu.table STEM

What is asked of headrace is a ratio to the best peer, whatever its bits; over 1 is always a win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click
import msgspec

from benchmarks.cpu import results
from benchmarks.cpu.results import Quality, Results, Run
from headrace.bench.plot import plot
from headrace.bench.report import figure, number
from headrace.bench.stats import Level
from headrace.errors import ConfigError

OURS = "headrace"  # every other row of ours begins so too
Value = Callable[[Run], float | None]


class Asked(msgspec.Struct, frozen=True):
    """One figure of which something is asked. `least`, `aim`: ratios to the best peer."""

    work: str
    value: Value
    least: float
    aim: float
    more: bool = True  # is better
    peers: str = ""  # what the names of the peers that count begin with


class Verdict(msgspec.Struct, frozen=True):
    """An `Asked` with figures. None: not measured."""

    asked: Asked
    ours: float | None
    best: float | None  # of the peers
    who: str  # has the best
    ratio: float | None  # > 1: ours is better

    @property
    def met(self) -> bool | None:
        return None if self.ratio is None else self.ratio >= self.asked.least


def _rate(concurrency: int) -> Value:
    def value(run: Run) -> float | None:
        level = run.level(concurrency)
        return level.output_tokens_per_s if level else None

    return value


def _ttft_ms(run: Run) -> float | None:
    level = run.level(16)
    return level.ttft_s.p50 * 1e3 if level and level.ttft_s else None


def _asked() -> list[Asked]:
    factors = {1: (1.0, 1.3), 4: (1.3, 1.8), 8: (1.3, 1.8)}
    factors |= dict.fromkeys((16, 32, 64), (1.3, 1.6))
    found = [Asked(f"tokens/s, c = {c}", _rate(c), *f) for c, f in factors.items()]
    return [
        *found,
        Asked("TTFT p50 ms, c = 16", _ttft_ms, 2.0, 3.0, more=False, peers="llama-server"),
        Asked("prompt tokens/s, 512 alone", lambda run: run.prefill_tokens_per_s, 1.3, 1.8),
        Asked("peak memory MiB", lambda run: run.peak_mib, 1.0, 1.0, more=False),
    ]


ASKED = _asked()
READY_S, READY_AIM_S = 3.0, 1.5


def verdicts(found: Results) -> list[Verdict]:
    """Ours against the best peer, one each of `ASKED`."""
    ours = next((run for run in found.runs if run.name == OURS), None)
    return [_verdict(asked, ours, found.runs) for asked in ASKED]


def _verdict(asked: Asked, ours: Run | None, runs: Iterable[Run]) -> Verdict:
    values = [
        (value, run.name)
        for run in runs
        if not run.name.startswith(OURS) and run.name.startswith(asked.peers)
        if (value := asked.value(run)) is not None
    ]
    mine = asked.value(ours) if ours else None
    if not values:
        return Verdict(asked, mine, None, "", None)
    best, who = max(values) if asked.more else min(values)
    ratio = None
    if mine:
        ratio = mine / best if asked.more else best / mine
    return Verdict(asked, mine, best, who, ratio)


def markdown(found: Results) -> str:
    """All of it. Needs at least one run or one quality."""
    levels = sorted({x.concurrency for run in found.runs for x in run.levels})
    parts = [f"# {_title(found)}", "", *_head(found)]
    if found.runs:
        parts += ["## Output tokens a second, and what comes with it", ""]
        parts += _rows(found, levels)
        parts += ["", "## Milliseconds, p50 / p99, by requests at once", ""]
        parts += _latencies(found.runs, levels)
        parts += ["", "## Against the best peer", ""]
        parts += _against(found)
    if found.quality:
        parts += ["", "## Precision", ""]
        parts += _precision(found.quality)
    if found.runs:
        parts += ["", "## Settings", ""]
        parts += [line for run in found.runs for line in _setting(run)]
    return "\n".join(parts) + "\n"


def _title(found: Results) -> str:
    if not found.runs:
        return "Precision on the processor"
    run = next((run for run in found.runs if run.name == OURS), found.runs[0])
    known = run.conditions
    return f"{run.model} on {known['cores']} cores of {known['processor']}"


def _head(found: Results) -> list[str]:
    if not found.runs:
        return []
    room = sorted({run.context_tokens for run in found.runs})
    return [
        "Over HTTP, streamed, 64 random ids in, 75 tokens out, greedy; one server at a time, the "
        f"load generator on the same cores; room for {', '.join(map(str, room))} tokens of KV. "
        "Memory is the largest sum of proportional set sizes of the server's processes. "
        "Agreement is with the most likely token of torch float32 on the dequantised weights.",
        "",
    ]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * left + "---:|" * (len(heads) - left),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _rows(found: Results, levels: Sequence[int]) -> list[str]:
    heads = ["server", "weights and activations", *(f"c = {c}" for c in levels)]
    heads += ["512-token prompt tok/s", "ready s", "peak MiB", "perplexity", "agreement", "date"]
    rows = []
    for run in found.runs:
        quality = found.quality_of(run.name)
        rows.append([
            run.name,
            run.bits,
            *(number(_rate(c)(run), 0) for c in levels),
            number(run.prefill_tokens_per_s, 0),
            number(run.ready_s, 2),
            number(run.peak_mib, 0),
            number(quality.perplexity if quality else None, 3),
            f"{quality.agreement:.1%}" if quality else "-",
            run.conditions["date"],
        ])  # fmt: skip
    return _table(heads, rows, left=2)


def _latencies(runs: Sequence[Run], levels: Sequence[int]) -> list[str]:
    heads = ["server", "figure", *(f"c = {c}" for c in levels)]
    rows = []
    for run in runs:
        rows.append([run.name, "TTFT", *(_pair(run.level(c), "ttft_s", 0) for c in levels)])
        rows.append([run.name, "ITL", *(_pair(run.level(c), "itl_s", 1) for c in levels)])
    return _table(heads, rows, left=2)


def _pair(level: Level | None, name: str, digits: int) -> str:
    if level is None:
        return "-"
    of = getattr(level, name)
    return f"{figure(of, 'p50', 1e3, digits)} / {figure(of, 'p99', 1e3, digits)}"


def _against(found: Results) -> list[str]:
    said = {None: "", True: "met", False: "**missed**"}
    rows = [
        [
            v.asked.work,
            number(v.ours, 0),
            number(v.best, 0),
            v.who or "-",
            number(v.ratio, 2),
            f"{v.asked.least:.1f}",
            f"{v.asked.aim:.1f}",
            said[v.met],
        ]
        for v in verdicts(found)
    ]
    ours = next((run for run in found.runs if run.name == OURS), None)
    ready = ours.ready_s if ours else None
    met = None if ready is None else ready <= READY_S
    rows.append(
        ["ready s", number(ready, 2), "-", "-", "-", f"{READY_S} s", f"{READY_AIM_S} s", said[met]]
    )
    heads = ["work", "headrace", "best peer", "which", "ratio", "asked", "aim", ""]
    return _table(heads, rows)


def _precision(quality: Sequence[Quality]) -> list[str]:
    heads = ["computed by", "perplexity", "agreement", "mean KL, nats", "tokens", "date"]
    rows = [
        [
            x.name,
            f"{x.perplexity:.3f}",
            f"{x.agreement:.2%}",
            "-" if x.divergence is None else f"{x.divergence:.1e}",
            str(x.tokens),
            x.date,
        ]
        for x in quality
    ]
    texts = sorted({x.text for x in quality})
    return [*_table(heads, rows), "", f"Text: {'; '.join(texts)}."]


def _setting(run: Run) -> list[str]:
    known = run.conditions
    where = f"{known['cores']} cores of {known['processor']}, {known['date']}"
    lines = [f"- **{run.name}** ({run.version or 'not there'}), {run.model}, {where}"]
    lines += [f"  `{run.settings}`"] if run.settings else []
    return lines + [f"  - {note}" for note in run.notes]


def write(found: Results, stem: Path) -> None:
    """STEM.md, and STEM.png and .svg if there is something to draw and matplotlib."""
    stem.with_suffix(".md").write_text(markdown(found))
    series = {run.name: run.levels for run in found.runs if run.levels}
    if not series:
        return
    known = found.runs[0].conditions
    try:
        plot(series, stem, title=_title(found), cores=int(known["cores"]))
    except ConfigError as error:
        click.echo(f"no plot: {error}")


@click.command()
@click.argument("stem", type=click.Path(path_type=Path))
def main(stem: Path) -> None:
    """Write and print the table of STEM.json again."""
    found = results.read(stem.with_suffix(".json"))
    if not (found.runs or found.quality):
        raise click.ClickException(f"{stem.with_suffix('.json')} holds no results")
    write(found, stem)
    click.echo(markdown(found))


if __name__ == "__main__":
    main()

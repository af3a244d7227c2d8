"""`headrace plan`: what of a model fits on a device, how fast it can be, what it costs."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from headrace.accelerators import ACCELERATORS, Accelerator, processor
from headrace.backends.cpu.device import cores
from headrace.cli.alone import Tied, refuse_alone
from headrace.cli.bench import Numbers, base_of
from headrace.config import parse_bytes
from headrace.errors import ConfigError
from headrace.extras import install
from headrace.models.sizes import WEIGHT_BYTES
from headrace.native.library import Library, load
from headrace.native.rate import product_rate
from headrace.planning import AS_STORED, KV_BYTES, Limit, Plan, Planner
from headrace.sources.resolve import resolve

COUNTS = Numbers(int)
DEVICES = (*ACCELERATORS, "cpu")


class Beside(msgspec.Struct, frozen=True):
    """A limit and what a server took. `share`: the limit over it."""

    kind: str
    batch: int
    tokens: int
    limit_s: float
    measured_s: float
    share: float


@click.command("plan")
@click.argument("model", default="")
@click.option("--device", type=click.Choice(DEVICES), required=True, help="cpu is measured here")
@click.option("--memory", metavar="SIZE", help="of the device, such as 80GB; default: its own")
@click.option("--bandwidth", type=click.FloatRange(0, min_open=True), help="GB/s, instead")
@click.option("--tflops", type=click.FloatRange(0, min_open=True), help="of products, instead")
@click.option("--weights", type=click.Choice([AS_STORED, *WEIGHT_BYTES]), help="default: as stored")
@click.option("--kv-dtype", type=click.Choice(list(KV_BYTES)), default="bfloat16")
@click.option("--utilization", type=click.FloatRange(0, 1), default=0.9, help="of the memory")
@click.option("--efficiency", type=click.FloatRange(0.01, 1), default=1.0, help="of both rates")
@click.option("--price", type=click.FloatRange(0), default=0.0, help="of an hour of the device")
@click.option("--context", type=COUNTS, default="512,4096", help="tokens behind a sequence")
@click.option("--batch", type=COUNTS, default="1,8,32,128", help="sequences that decode at once")
@click.option("--prompt", type=COUNTS, default="512,4096", help="tokens of a prompt")
@click.option("--url", help="a server of this model on this device: measured beside the limits")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="of that server")
@click.option("--measure-batch", type=COUNTS, default="1,8", help="requests at once there")
@click.option("--measure-prompt", type=click.IntRange(1), default=256, help="tokens of a prompt")
@click.option("--measure-output", type=click.IntRange(8), default=64, help="tokens of an answer")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout instead of tables")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    device: str,
    memory: str | None,
    bandwidth: float | None,
    tflops: float | None,
    context: tuple[int, ...],
    batch: tuple[int, ...],
    prompt: tuple[int, ...],
    as_json: bool,
    url: str | None,
    **asked: Any,
) -> None:
    """Tell what fits, the least time of decode steps and prompts, and the least cost of a million
    tokens. Reads no weights; of a model of the Hub config and tokenizer are downloaded.
    """
    measured = "api_key measure_batch measure_prompt measure_output"
    refuse_alone(ctx, [Tied(measured, bool(url), "without --url")])
    on = _device(device, memory, bandwidth, tflops, asked["weights"] or "")
    planner = Planner(
        resolve(model, say=lambda line: click.echo(line, err=True), weights=False),
        on,
        weights=asked["weights"] or "",
        kv_dtype=asked["kv_dtype"],
        utilization=asked["utilization"],
        efficiency=asked["efficiency"],
        price_per_hour=asked["price"],
    )
    plan = planner.plan(context, batch, prompt)
    console = Console(width=None if Console().is_terminal else 120)
    if not as_json:
        for table in (_memory(plan), _decode(plan), _prefill(plan)):
            console.print(table)
            console.print()
    served, beside = _beside(planner, url, asked) if url else ("", [])
    if as_json:
        told = {"plan": plan, "served": served, "beside": beside}
        click.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
    elif beside:
        console.print(_measured(served, beside))


def _device(
    name: str, memory: str | None, bandwidth: float | None, tflops: float | None, weights: str
) -> Accelerator:
    known = ACCELERATORS.get(name)
    given = [what for what in (memory, bandwidth, tflops) if what is not None]
    if known is None:
        known = _processor(weights)
    if not given:
        return known
    return Accelerator(
        name,
        parse_bytes(memory, "memory") if memory else known.memory_bytes,
        bandwidth * 1e9 if bandwidth else known.read_bytes_per_s,
        tflops * 1e12 if tflops else known.flops_per_s,
        "as given" if len(given) == 3 else f"partly as given, else {known.source}",
    )


def _processor(weights: str) -> Accelerator:
    """This machine's, with products of int8 where a server's native kernels compute so: on
    quantised weights, which those that are stored may be. `weights`: "" = as stored."""
    known = processor()
    library = load() if weights in ("", AS_STORED, "int8", "int4") else None
    if not isinstance(library, Library):
        return known
    rate = max(known.flops_per_s, product_rate(library, cores()))
    source = "measured here; products by the int8 kernels"
    return msgspec.structs.replace(known, flops_per_s=rate, source=source)


def _beside(planner: Planner, url: str, asked: dict[str, Any]) -> tuple[str, list[Beside]]:
    """The server's name of its model, and what it took beside the limits."""
    try:
        from headrace.bench.beside import measure_beside
        from headrace.bench.load import Target, first_model, run_loop
    except ImportError:
        raise ConfigError(f"--url needs aiohttp: {install('bench')}") from None
    target = Target(url=base_of(url), model="", api_key=asked["api_key"])
    target = msgspec.structs.replace(target, model=run_loop(first_model(target)))
    loads = asked["measure_batch"], asked["measure_prompt"], asked["measure_output"]
    found = []
    for seen in run_loop(measure_beside(target, *loads)):
        if seen.kind == "decode":
            limit = planner.decode(seen.tokens, seen.batch).limit
        else:
            limit = planner.prefill(seen.tokens).limit
        share = limit.seconds / seen.seconds
        found.append(Beside(seen.kind, seen.batch, seen.tokens, limit.seconds, seen.seconds, share))
    return target.model, found


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False)


def _memory(plan: Plan) -> Table:
    device = plan.device
    table = _table("plan", f"{plan.name} on {device.name}")
    table.add_row("memory", f"{_gb(device.memory_bytes)}, {_gb(plan.usable_bytes)} of it used")
    table.add_row("reads", f"{device.read_bytes_per_s / 1e9:.4g} GB/s ({device.source})")
    table.add_row("products", f"{device.flops_per_s / 1e12:.4g} TFLOPS")
    table.add_row("even at", f"{device.ridge:.0f} FLOPs a byte")
    if plan.efficiency < 1:
        table.add_row("efficiency", f"{plan.efficiency:.0%} of both rates is counted on")
    read = f", a step reads {_gb(plan.step_weight_bytes)}"
    table.add_row("weights", f"{_gb(plan.weight_bytes)} {plan.weights}{read}")
    table.add_row("KV cache", f"{plan.kv_bytes_per_token:.0f} bytes a token in {plan.kv_dtype}")
    if plan.kv_tokens < 1:
        table.add_row("tokens", "none: the weights are too large")
        return table
    table.add_row("tokens", f"{plan.kv_tokens} kept in every layer, activations not counted")
    for room in plan.rooms:
        table.add_row("", f"{room.sequences} sequences of {room.context}")
    even = f"{plan.even_batch} sequences" if plan.even_batch else "never: the KV cache's reads rule"
    table.add_row("decode is bound by products", f"from {even}" if plan.even_batch else even)
    return table


def _decode(plan: Plan) -> Table:
    columns = "context", "batch", "step ms", "tokens/s", "each", "bound by", "FLOPs/byte"
    table = _table("decode, at best:", *columns, *_price_column(plan))
    for one in plan.decode:
        each = _number(1 / one.limit.seconds)
        table.add_row(
            "" if one.fits else "does not fit",
            f"{one.context}",
            f"{one.batch}",
            *_step(one.limit),
            _number(one.tokens_per_s),
            each,
            *_why(one.limit),
            *_price(one.cost_per_million),
        )
    return table


def _prefill(plan: Plan) -> Table:
    columns = "tokens", "ms", "tokens/s", "bound by", "FLOPs/byte"
    table = _table("a prompt, at best:", *columns, *_price_column(plan))
    for one in plan.prefill:
        table.add_row(
            "" if one.fits else "does not fit",
            f"{one.tokens}",
            *_step(one.limit),
            _number(one.tokens_per_s),
            *_why(one.limit),
            *_price(one.cost_per_million),
        )
    return table


def _measured(served: str, beside: list[Beside]) -> Table:
    table = _table(
        f"{served}, measured:", "requests", "tokens", "limit ms", "measured ms", "limit/measured"
    )
    for one in beside:
        times = _number(one.limit_s * 1e3), _number(one.measured_s * 1e3)
        table.add_row(one.kind, f"{one.batch}", f"{one.tokens}", *times, f"{one.share:.0%}")
    return table


def _step(limit: Limit) -> tuple[str]:
    return (_number(limit.seconds * 1e3),)


def _why(limit: Limit) -> tuple[str, str]:
    return limit.bound, _number(limit.flops_per_byte)


def _price_column(plan: Plan) -> list[str]:
    return ["a million tokens, at least"] if plan.price_per_hour else []


def _price(cost: float | None) -> list[str]:
    return [] if cost is None else [_number(cost)]


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f} GB"

"""`headrace inspect`: what is this model, and what fits where?"""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.table import Table

from headrace.cli.alone import Tied, refuse_alone
from headrace.config import parse_bytes
from headrace.inspection import Inspection, inspect
from headrace.sources.resolve import resolve

_SHOWN = 12  # ids of tokens that no text gives


@click.command("inspect")
@click.argument("model", default="")
@click.option("--memory", metavar="SIZE", help="what fits in so much, such as 24GB or 80GiB")
@click.option("--context", type=click.IntRange(min=1), help="tokens of one sequence there")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout instead of tables")
@click.pass_context
def command(
    ctx: click.Context, /, model: str, memory: str | None, context: int | None, as_json: bool
) -> None:
    """Tell architecture, parameters, KV bytes a token, what fits in given memory, and what the
    tokenizer makes of texts. Reads no weights; of a model of the Hub config and tokenizer are
    downloaded."""
    refuse_alone(ctx, [Tied("context", memory is not None, "without --memory")])
    files = resolve(model, say=lambda line: click.echo(line, err=True), weights=False)
    size_bytes = parse_bytes(memory, "memory") if memory else 0
    told = inspect(files, size_bytes, context or 0)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
        return
    console = Console(width=None if Console().is_terminal else 120)
    for table in (_model(told), _kv(told), _fits(told, memory), _tokenizer(told)):
        if table.row_count:
            console.print(table)
            console.print()


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False)


def _model(told: Inspection) -> Table:
    table, counts = _table("model", told.name), told.parameters
    table.add_row("files", told.path)
    table.add_row("architecture", told.architecture)
    table.add_row("beyond plain", ", ".join(told.features) or "nothing")
    active = f", {_count(counts.active)} a token" if counts.active != counts.total else ""
    table.add_row("parameters", f"{_count(counts.total)}{active}")
    table.add_row("layers", f"{told.layers}, {told.hidden} wide")
    table.add_row("heads", f"{told.heads} and {told.kv_heads} of K and V, {told.head_dim} wide")
    table.add_row("positions", f"{told.positions}")
    if told.stored_bytes:
        table.add_row("weight files", _gib(told.stored_bytes))
    return table


def _kv(told: Inspection) -> Table:
    table = _table("KV cache in bfloat16", "layers", "window", "bytes a token", "at most")
    for group in told.kv_groups:
        window = f"{group.window}" if group.window else "-"
        most = _mib(group.window * group.bytes_per_token) if group.window else "-"
        table.add_row(group.kind, f"{group.layers}", window, f"{group.bytes_per_token}", most)
    if len(told.kv_groups) > 1:
        layers = sum(group.layers for group in told.kv_groups)
        table.add_row("all", f"{layers}", "", f"{told.kv_bytes_per_token}")
    return table


def _fits(told: Inspection, memory: str | None) -> Table:
    table = _table(f"in {memory}", "weights", "left", "tokens", f"sequences of {told.context}")
    for fit in told.fits:
        left = _gib(fit.kv_bytes) if fit.kv_bytes > 0 else "too large"
        counts = f"{fit.tokens}", f"{fit.sequences}"
        table.add_row(fit.weights, _gib(fit.weight_bytes), left, *counts)
    return table


def _tokenizer(told: Inspection) -> Table:
    table, found = _table("tokenizer", ""), told.tokenizer
    if found is None:
        table.add_row("none", "prompts and answers are token ids")
        return table
    table.add_row("vocabulary", f"{found.vocabulary}, {found.special} of them special")
    for kind, characters in found.characters_per_token.items():
        table.add_row(kind, f"{characters:.2f} characters a token")
    if found.unreachable is None:
        table.add_row("no text gives", "unknown: its tokens have no texts of their own")
        return table
    table.add_row("parts of characters", f"{found.parts} tokens")
    some = ", ".join(str(i) for i in found.unreachable[:_SHOWN])
    more = ", ..." if len(found.unreachable) > _SHOWN else ""
    table.add_row(
        "no text gives", f"{len(found.unreachable)} tokens" + (f": {some}{more}" if some else "")
    )
    return table


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.1f} million"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB a sequence"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"

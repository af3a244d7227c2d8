"""`headrace ablate`: one technique after another on this machine, and what each is worth."""

from __future__ import annotations

import contextlib
import importlib.metadata
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.backends.choose import resolve_backend
from headrace.bench.figure import check_installed
from headrace.bench.lengths import FORMS
from headrace.bench.techniques import Load, Row, arguments, rows_of
from headrace.bench.workload import Workload
from headrace.cli.alone import Tied, refuse_alone
from headrace.cli.bench import FILE, LengthType
from headrace.cli.child_server import ChildServer
from headrace.config import Settings
from headrace.errors import ConfigError, EngineError, SetupError
from headrace.extras import install
from headrace.sources.card import read_card
from headrace.sources.resolve import FAKE, resolve


@click.command("ablate")
@click.argument("model", default="")
@click.option("--backend", type=click.Choice(["auto", "fake", "cpu", "cuda"]), default="auto")
@click.option(
    "--prompt",
    type=click.Choice(["auto", "words", "ids"]),
    default="auto",
    show_default=True,
    help="words in chat messages, or token ids; auto: words where the model has a chat template",
)
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=48, show_default=True, help="a row")
@click.option("--prompt-tokens", type=LengthType(), default="32", help=f"of each alone: {FORMS}")
@click.option("--prefixes", type=click.IntRange(0), default=4, show_default=True, help="shared")
@click.option("--prefix-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--max-tokens", type=LengthType(), default="lognormal:24:1", show_default=True)
@click.option("--max-model-len", type=click.IntRange(64), default=1024, show_default=True)
@click.option(
    "--whole",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="KV memory, in sequences of --max-model-len",
)
@click.option("--rounds", type=click.IntRange(1), default=3, help="a row; the median counts")
@click.option("--only", multiple=True, metavar="ROW", help="only this row; may be repeated")
@click.option("--serve", multiple=True, metavar="FLAG", help="of every server: --serve=--threads=2")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=FILE, help="JSON; .md beside it")
@click.option("--plot/--no-plot", default=False, help=".svg and .png beside --out")
def command(
    model: str,
    backend: str,
    prompt: str,
    concurrency: int,
    max_model_len: int,
    whole: int,
    rounds: int,
    only: tuple[str, ...],
    serve: tuple[str, ...],
    out: Path | None,
    plot: bool,
    **load: Any,
) -> None:
    """Serve the same requests again and again, each time with one more technique switched on."""
    _check_plot(out, plot=plot)
    try:
        from headrace.bench import ablate
        from headrace.bench.report import conditions
    except ImportError:
        raise ConfigError(f"ablate needs aiohttp: {install('bench')}") from None
    asked = Settings(model=model, backend=backend)  # type: ignore[arg-type]
    backend = resolve_backend(asked).value
    sizes = Load(sequences=concurrency, max_model_len=max_model_len, whole=whole)
    rows, fixed = rows_of(backend, sizes)
    rows = _chosen(rows, only)
    refuse_alone(click.get_current_context(), _pairs(load["prefixes"], rows))
    console = Console(width=None if Console().is_terminal else 120)
    work = Workload(nonce=secrets.token_hex(4), **_prompts(prompt, model, backend, console), **load)

    @contextlib.contextmanager
    def start(row: Row) -> Iterator[str]:
        flags = arguments(row.settings)
        console.print(f"{row.name}: {' '.join(flags)}", highlight=False)
        on = [] if "engine" in row.settings else ["--backend", backend]
        with _server([*([model] if model else []), *on, *flags, *serve]) as server:
            yield server.url

    def tell(row: ablate.Measured) -> None:
        console.print(ablate.table([row]))

    with _failures():
        measured = ablate.measure_rows(rows, work, concurrency, start, rounds=rounds, on_row=tell)
    console.print(ablate.table(measured))
    for one in fixed:
        console.print(f"{one.name}: not measured; {one.why}")
    if not out:
        return
    found = ablate.Ablation(
        model=model or "SmolLM2-135M-Instruct",
        backend=backend,
        conditions=conditions(**_versions(), memory=f"{whole} x {max_model_len} tokens of KV"),
        workload=work,
        concurrency=concurrency,
        rows=measured,
        fixed=fixed,
    )
    ablate.save(found, out)
    if plot:
        ablate.plot(found, out.with_suffix(""))
    console.print(f"written: {out}")


def _prompts(asked: str, model: str, backend: str, console: Console) -> dict[str, Any]:
    """Fields of the workload: words of everyday English as chat messages, or token ids as they are.

    Ids need neither a template nor a tokenizer that knows the words: one that does not may make six
    tokens of each. Raises ModelError for what is no model.
    """
    if asked == "words":
        return {}
    say = partial(click.echo, err=True)
    files = FAKE if backend == "fake" else resolve(model, say=say, weights=False, pickles=True)
    card = read_card(files)
    if asked == "auto":
        if backend != "fake" and card.chat_template is not None:
            return {}
        why = "makes a token of each letter" if backend == "fake" else "has no chat template"
        console.print(f"prompts are token ids: the model {why}")
    low, high = Workload().id_range
    ids = min(low, card.vocab_size // 10), min(high, card.vocab_size)
    return {"kind": "ids", "endpoint": "completions", "id_range": ids}


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """A request that fails is told in one line, with the server's words."""
    try:
        yield
    except EngineError as error:
        raise click.ClickException(error.message) from None


def _server(flags: list[str]) -> ChildServer:
    """Raises SetupError with all that the server said before it ended."""
    said: list[str] = []
    try:
        return ChildServer(flags, said.append)
    except SetupError as error:
        raise SetupError("\n".join([error.message, *said])) from None


def _pairs(prefixes: int, rows: list[Row]) -> list[Tied]:
    """Flags that have an effect beside others alone."""
    pooled = any("kv_blocks" in row.settings for row in rows)
    return [
        Tied("prefix_tokens", prefixes > 0, "without --prefixes"),
        Tied("whole", pooled, "beside --only naive, which has no KV pool"),
    ]


def _check_plot(out: Path | None, *, plot: bool) -> None:
    if plot and not out:
        raise ConfigError("--plot needs --out, beside which it writes", param="plot")
    if plot:
        check_installed()


def _versions() -> dict[str, str]:
    """Of the libraries that compute in some rows; those that are not here are left out."""
    found = {}
    for name in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _chosen(rows: list[Row], only: tuple[str, ...]) -> list[Row]:
    """Those that are named, or all. Raises ConfigError for a name that there is not."""
    if wrong := set(only) - {row.name for row in rows}:
        names = ", ".join(row.name for row in rows)
        raise ConfigError(f"no row {min(wrong)!r} here; there are {names}", param="only")
    return [row for row in rows if not only or row.name in only]

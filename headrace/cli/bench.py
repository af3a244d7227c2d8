"""`headrace bench`: load a running server, level by level, and print what it took."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec

from headrace.bench.lengths import FORMS, Lengths, parse_lengths
from headrace.bench.stats import SLOS
from headrace.bench.trace import BLOCK_TOKENS, read_trace
from headrace.bench.workload import SCHEMA, Workload
from headrace.cli.alone import Tied, refuse_alone
from headrace.errors import ConfigError, EngineError

Command = Callable[..., None]


class Numbers(click.ParamType[tuple[Any, ...]]):
    """`1,4,8` -> (1, 4, 8), each of one type and above 0."""

    name = "n,n,..."

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self._kind(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < number < 1e9 for number in numbers):
            what = "whole numbers from 1" if self._kind is int else "numbers above 0"
            self.fail(f"{value!r}: {what}, such as 1,4,8", param, ctx)
        return numbers


class LengthType(click.ParamType[int | Lengths]):
    """A number or a law."""

    name = "length"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | Lengths:
        if isinstance(value, int | Lengths):
            return value
        try:
            return parse_lengths(str(value))
        except ConfigError as error:
            self.fail(error.message, param, ctx)


class Limit(click.ParamType[tuple[str, float]]):
    """`ttft:200` -> ("ttft", 200.0), milliseconds."""

    name = "name:ms"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, _, limit = str(value).partition(":")
        try:
            limit_ms = float(limit)
        except ValueError:
            limit_ms = 0.0
        if name not in SLOS or not 0 < limit_ms < 1e12:
            self.fail(f"{value!r}: one of {', '.join(SLOS)}, a colon, milliseconds", param, ctx)
        return name, limit_ms


STREAMED = {"ttft", "ttfc", "itl", "tpot"}  # of the limits: times that streams alone have
SHARE = click.FloatRange(0, 1)
FILE = click.Path(dir_okay=False, path_type=Path)
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--url", {"default": "http://127.0.0.1:8000", "help": "server under load"}),
    ("--model", {"default": "", "help": "name in requests; default: the server's first"}),
    ("--api-key", {"default": "", "envvar": "OPENAI_API_KEY", "help": "sent as a bearer token"}),
    (
        "--concurrency",
        {
            "type": Numbers(int),
            "default": None,
            "help": "closed loops: sessions open at once  [default: 1,4,8,16,32,64]",
        },
    ),
    ("--rate", {"type": Numbers(float), "default": None, "help": "open loops: sessions a second"}),
    (
        "--sweep",
        {
            "type": click.IntRange(3),
            "default": None,
            "help": "so many levels: one at a time, all at once, rates between; "
            "ends when over-saturated",
        },
    ),
    ("--trace", {"type": FILE, "default": None, "help": "replay this Mooncake trace (JSONL, .gz)"}),
    ("--speed", {"type": click.FloatRange(1e-3), "default": 1.0, "help": "of the trace's clock"}),
    (
        "--trace-block-tokens",
        {
            "type": click.IntRange(1),
            "default": BLOCK_TOKENS,
            "help": "of a hash id; other sizes scale every length of the trace",
        },
    ),
    (
        "--burstiness",
        {
            "type": click.FloatRange(0),
            "default": 1.0,
            "help": "gamma shape of an open loop's gaps: 1 Poisson, below it clumps, 0 even",
        },
    ),
    ("--burst", {"type": click.IntRange(1), "default": 1, "help": "sessions that arrive together"}),
    (
        "--most-open",
        {"type": click.IntRange(0), "default": 0, "help": "an open loop's limit; 0: none"},
    ),
    ("--duration", {"type": click.FloatRange(0.001), "help": "seconds a level, not --requests"}),
    (
        "--requests",
        {
            "type": click.IntRange(1),
            "default": None,
            "help": "a level  [default: 64; of a trace: all]",
        },
    ),
    ("--max-tokens", {"type": LengthType(), "default": "75", "help": f"of an answer: {FORMS}"}),
    ("--prompt-tokens", {"type": LengthType(), "default": "64", "help": "of a prompt, the same"}),
    ("--single-prompt", {"default": "", "help": "this text in every request; default: random"}),
    ("--prompt", {"type": click.Choice(["words", "ids"]), "default": "words"}),
    ("--endpoint", {"type": click.Choice(["chat", "completions"]), "default": "chat"}),
    ("--prefixes", {"type": click.IntRange(0), "default": 0, "help": "shared prefixes"}),
    ("--prefix-tokens", {"type": click.IntRange(1), "default": 512, "help": "of each"}),
    (
        "--zipf",
        {"type": click.FloatRange(0), "default": 0.0, "help": "exponent of their popularity"},
    ),
    (
        "--drift",
        {
            "type": click.IntRange(0),
            "default": 0,
            "help": "sessions after which the most popular prefix leaves; 0: never",
        },
    ),
    ("--turns", {"type": click.IntRange(1), "default": 1, "help": "of a session"}),
    (
        "--think",
        {"type": click.FloatRange(0), "default": 0.0, "help": "mean seconds between turns"},
    ),
    (
        "--fan-out",
        {
            "type": click.IntRange(0),
            "default": 0,
            "help": "agents: one request, so many side by side, one over all answers",
        },
    ),
    ("--structured", {"type": SHARE, "default": 0.0, "help": "share that answers by a schema"}),
    ("--schema", {"type": FILE, "default": None, "help": "JSON schema file of those"}),
    ("--cancel", {"type": SHARE, "default": 0.0, "help": "share dropped at a random chunk"}),
    ("--stream/--no-stream", {"default": True, "help": "without it there is no TTFT and no ITL"}),
    ("--ignore-eos/--no-ignore-eos", {"default": True, "help": "answers of exactly --max-tokens"}),
    ("--temperature", {"type": click.FloatRange(0), "default": 0.0}),
    ("--seed", {"type": int, "default": 0, "help": "of lengths, arrivals and shares"}),
    (
        "--nonce",
        {"default": None, "help": "of the words, with the seed; default: another each run"},
    ),
    ("--warmup", {"type": click.IntRange(0), "default": 1, "help": "requests ahead, uncounted"}),
    ("--timeout", {"type": click.FloatRange(0.001), "default": 600.0, "help": "seconds a request"}),
    ("--slo", {"type": Limit(), "multiple": True, "help": "limit of goodput, as ttft:200 (ms)"}),
    ("--workers", {"type": click.IntRange(1), "default": 1, "help": "processes that send"}),
    ("--pid", {"type": int, "default": None, "help": "server's process, for its CPU use"}),
    ("--scrape/--no-scrape", {"default": True, "help": "read the server's /metrics each second"}),
    ("--name", {"default": "", "help": "of this run in the report; default: the model"}),
    ("--out", {"type": FILE, "help": "JSON report"}),
    ("--html", {"type": FILE, "help": "the report as one HTML page"}),
    ("--plot", {"type": FILE, "help": "four panels: this name with .svg and with .png"}),
    ("--requests-out", {"type": FILE, "help": "JSON, one line a request"}),
)


def _options(command: Command) -> Command:
    for name, more in reversed(OPTIONS):
        shown = more.get("default") not in (None, "", 0, 0.0, True, ())
        command = click.option(name, show_default=shown, **more)(command)
    return command


def workload_of(asked: dict[str, Any]) -> Workload:
    """The workload that the options describe. Raises ConfigError for pairs that cannot be."""
    if asked["prompt"] == "ids":
        if asked["endpoint"] == "chat":
            raise ConfigError("--prompt ids needs --endpoint completions", param="endpoint")
        if asked["turns"] > 1 or asked["fan_out"]:
            raise ConfigError("answers are text: --prompt ids has one turn", param="prompt")
    if asked["turns"] > 1 and asked["fan_out"]:
        raise ConfigError("--fan-out has turns of its own: not with --turns", param="turns")
    if asked["structured"] and asked["endpoint"] != "chat":
        raise ConfigError("--structured needs --endpoint chat", param="structured")
    if asked["cancel"] and not asked["stream"]:
        raise ConfigError("--cancel needs --stream", param="cancel")
    if asked["single_prompt"] and asked["prefixes"]:
        raise ConfigError("--single-prompt has no prefixes", param="prefixes")
    schema = SCHEMA
    if asked["schema"]:
        try:
            schema = json.loads(asked["schema"].read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{asked['schema']}: {error}", param="schema") from None
    trace = asked["trace"]
    if trace:
        for _ in read_trace(str(trace)):
            pass  # a line that is wrong is told before anything is sent
    same = (
        "max_tokens prompt_tokens endpoint prefixes prefix_tokens zipf drift turns fan_out "
        "structured cancel stream ignore_eos temperature seed speed trace_block_tokens"
    )
    nonce = secrets.token_hex(4) if asked["nonce"] is None else asked["nonce"]
    return Workload(
        requests=asked["requests"] or (0 if trace else 64),
        single=asked["single_prompt"],
        kind=asked["prompt"],
        nonce=nonce,
        think_s=asked["think"],
        schema=schema,
        trace=str(trace.resolve()) if trace else "",
        **{name: asked[name] for name in same.split()},
    )


def _pairs(asked: dict[str, Any]) -> list[Tied]:
    """Flags that have an effect beside others alone."""
    trace, sweep = asked["trace"], asked["sweep"]
    rated = bool(asked["rate"] or sweep)
    own = (
        "max_tokens prompt_tokens single_prompt prefixes prefix_tokens zipf drift turns think "
        "fan_out structured schema cancel"
    )
    return [
        Tied(own, not trace, "beside --trace, which has its own requests"),
        Tied("speed trace_block_tokens", bool(trace), "without --trace"),
        Tied("burstiness burst", rated, "without --rate or --sweep"),
        Tied("most_open", rated or bool(trace), "without --rate, --sweep or --trace"),
        Tied(
            "requests",
            asked["duration"] is None or bool(trace or sweep),
            "beside --duration, which ends a level instead",
        ),
        Tied("prompt prompt_tokens nonce", not asked["single_prompt"], "beside --single-prompt"),
        Tied("prefix_tokens drift", asked["prefixes"] > 0, "without --prefixes"),
        Tied("zipf", asked["prefixes"] > 1, "without several --prefixes"),
        Tied("think", asked["turns"] > 1 or asked["fan_out"] > 0, "without --turns or --fan-out"),
        Tied("schema", asked["structured"] > 0, "without --structured"),
        Tied("ignore_eos", asked["structured"] < 1, "beside --structured 1: schemas end answers"),
        Tied("seed", _draws(asked), "beside --single-prompt, where nothing is drawn"),
        Tied(
            "name",
            bool(asked["out"] or asked["html"] or asked["plot"]),
            "without --out, --html or --plot",
        ),
    ]


def _draws(asked: dict[str, Any]) -> bool:
    """Something of the run goes by its seed: words, lengths, arrivals, shares or pauses."""
    even = not (asked["rate"] or asked["sweep"]) or asked["burstiness"] == 0
    shares = 0 < asked["structured"] < 1 or asked["cancel"] > 0
    lengths = isinstance(asked["max_tokens"], Lengths)
    return not asked["single_prompt"] or lengths or shares or asked["think"] > 0 or not even


def base_of(url: str) -> str:
    """The server's address as the load generator takes it: OpenAI's clients want /v1 behind it,
    people leave out http://. Raises ConfigError for what is no address."""
    whole = url if "//" in url else "http://" + url
    try:
        parts = urlsplit(whole)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        known = False
    if not known:
        raise ConfigError(f"--url {url!r}: http://HOST:PORT or https://HOST:PORT", param="url")
    return whole.rstrip("/").removesuffix("/v1")


@click.group("bench", invoke_without_command=True)
@_options
@click.pass_context
def command(context: click.Context, /, **asked: Any) -> None:
    """Load a server that speaks OpenAI's protocol and measure it, one level after another."""
    if context.invoked_subcommand:
        return
    if asked["trace"] and (asked["rate"] or asked["concurrency"] or asked["sweep"]):
        raise ConfigError("--trace has its own times", param="trace")
    if asked["sweep"] and asked["rate"]:
        raise ConfigError("--sweep finds its rates itself", param="rate")
    if asked["sweep"] and len(asked["concurrency"] or ()) > 1:
        raise ConfigError("--sweep takes one --concurrency, the most it tries", param="concurrency")
    refuse_alone(context, _pairs(asked))
    streamed = sorted(STREAMED & dict(asked["slo"]).keys())
    if streamed and not asked["stream"]:
        raise ConfigError(f"--slo {streamed[0]} needs --stream", param="slo")
    workload = workload_of(asked)
    from headrace.bench.console import Run, run
    from headrace.bench.stats import Shape

    open_ = Shape(
        concurrency=asked["most_open"],
        burstiness=asked["burstiness"],
        burst=asked["burst"],
        duration_s=asked["duration"],
    )
    levels = asked["concurrency"]
    if not (levels or asked["rate"] or asked["trace"] or asked["sweep"]):
        levels = (1, 4, 8, 16, 32, 64)
    try:
        found = run(
            Run(
                url=base_of(asked["url"]),
                model=asked["model"],
                api_key=asked["api_key"],
                timeout_s=asked["timeout"],
                workload=workload,
                closed=tuple(levels or ()),
                rates=tuple(asked["rate"] or ()),
                sweep=asked["sweep"] or 0,
                open_shape=open_,
                warmup=asked["warmup"],
                workers=asked["workers"],
                pid=asked["pid"],
                scrape=asked["scrape"],
                slo_ms=dict(asked["slo"]),
                name=asked["name"],
                out=asked["out"],
                requests_out=asked["requests_out"],
                html=asked["html"],
                plot=asked["plot"],
            )
        )
    except EngineError as error:
        raise click.ClickException(error.message) from None
    failed = [sum(itertools.chain(x.errors.values(), x.sheds.values())) for x in found]
    if all(count == x.requests for count, x in zip(failed, found, strict=True)):
        raise SystemExit(1)


@command.command("compare")
@click.argument("a", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("b", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def compare(a: Path, b: Path) -> None:
    """What changed from the report A to the report B, for the levels that both have."""
    from rich.console import Console

    from headrace.bench.compare import compared, differences
    from headrace.bench.report import Report, read

    def report(file: Path) -> Report:
        try:
            return read(file)[0]
        except (msgspec.MsgspecError, IndexError) as error:
            raise ConfigError(f"{file} is no report of headrace bench: {error}") from None

    one, two = report(a), report(b)
    console = Console(width=None if Console().is_terminal else 200)
    for line in differences(one, two):
        console.print(f"not the same: {line}", highlight=False, markup=False)
    console.print(compared(one, two, a.stem, b.stem))

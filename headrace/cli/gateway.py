"""`headrace gateway`: one front for many workers; `headrace gateway drain` empties one of them."""

from __future__ import annotations

import asyncio
import json
import time
import typing
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import uvloop

from headrace.cli.alone import Tied, refuse_alone
from headrace.config import flag_of
from headrace.errors import ConfigError
from headrace.gateway import page
from headrace.gateway.app import Gateway, serve
from headrace.gateway.board import Board
from headrace.gateway.discovery import DnsRegistry
from headrace.gateway.processes import Processes, listen
from headrace.gateway.registry import FileRegistry, Registry, StaticRegistry
from headrace.gateway.settings import (
    HELP,
    GatewaySettings,
    WorkerSpec,
    check_workers,
    merge,
    read_fleet,
)
from headrace.gateway.siblings import Siblings
from headrace.gateway.tenants import Doorkeeper
from headrace.gateway.tokenising import ModelTokens, load_models
from headrace.observe.logs import configure_logging, print_line

POLL_S = 0.2


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One flag a setting."""
    hints = typing.get_type_hints(GatewaySettings)
    for field in reversed(msgspec.structs.fields(GatewaySettings)):
        flag, name, hint = flag_of(field.name), field.name, hints[field.name]
        text = f"{HELP[name]}  [default {field.default!r}]"
        if isinstance(field.default, bool):
            option = click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
        elif isinstance(field.default, tuple):
            option = click.option(flag, name, multiple=True, metavar="TEXT", help=text)
        elif typing.get_origin(hint) is Literal:
            option = click.option(flag, name, type=click.Choice(typing.get_args(hint)), help=text)
        else:
            kind = type(field.default)
            option = click.option(flag, name, type=kind, metavar=kind.__name__, help=text)
        command = option(command)
    return command


@click.group("gateway", invoke_without_command=True)
@click.option("--worker", "urls", multiple=True, metavar="URL", help="a worker; may be repeated")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="fleet file (TOML): settings, workers, keys, tiers; workers are read again on change",
)
@_options
@click.pass_context
def command(
    ctx: click.Context, /, urls: tuple[str, ...], config_file: Path | None, **given: Any
) -> None:
    """Route requests to workers: headrace, vLLM, SGLang or any OpenAI-compatible server."""
    if ctx.invoked_subcommand is not None:
        return
    flags = {key: value for key, value in given.items() if value not in (None, ())}
    specs = tuple(WorkerSpec(url=url) for url in urls)
    file = read_fleet(config_file) if config_file else None
    workers = (*specs, *(file.workers if file else ()))
    check_workers(workers)
    if not workers and config_file is None:
        raise ConfigError("no workers: --worker URL, or --config FILE", param="worker")
    settings = merge(file.gateway if file else {}, flags)
    names = file is not None or any(spec.lookup for spec in workers)  # a file may bring some later
    refuse_alone(
        ctx,
        [Tied("dns_interval_s dns_keep_s dns_server", names, "without a worker that is a name")],
    )
    doorkeeper = Doorkeeper(file.keys, file.tiers) if file else Doorkeeper((), {})
    said = partial(_say, settings, doorkeeper.keyed, len(workers))
    check_limits(settings, doorkeeper)
    if settings.processes > 1:
        if any(worker.start is not None for worker in workers):
            raise ConfigError("workers are started by one process alone", param="processes")
        configure_logging(settings.log_level)
        _tokens(settings)  # each loads its own: here it is seen that they can
        if doorkeeper.limited and not settings.redis_url:
            raise ConfigError(
                "limits of several processes are kept in Redis or Valkey: redis_url",
                param="processes",
            )
        processes = Processes(
            settings.host,
            settings.port,
            settings.processes,
            settings.shutdown_timeout_s,
            partial(_serve_one, settings, specs, config_file),
            said,
        )
        raise SystemExit(processes.run())
    registry = _registry(specs, config_file, settings)
    run(settings, registry, doorkeeper, lambda made: said(made.port))


def check_limits(settings: GatewaySettings, doorkeeper: Doorkeeper) -> None:
    """Raises ConfigError for a server of limits where no tier has any."""
    if settings.redis_url and not doorkeeper.limited:
        raise ConfigError(
            "redis_url would change nothing: it shares limits, and no tier of the fleet file has "
            "one",
            param="redis_url",
        )


def run(
    settings: GatewaySettings,
    registry: Registry,
    doorkeeper: Doorkeeper,
    ready: Callable[[Gateway], None],
) -> None:
    """Listen and serve until SIGTERM or SIGINT. Raises ConfigError for an address that is taken."""
    configure_logging(settings.log_level)
    with listen(settings.host, settings.port, shared=False) as sock:
        models = _tokens(settings)
        _run(serve(settings, registry, doorkeeper, sock, ready, models=models))


def _registry(
    specs: tuple[WorkerSpec, ...], config_file: Path | None, settings: GatewaySettings
) -> Registry:
    inner = StaticRegistry(specs) if config_file is None else FileRegistry(config_file, specs)
    return DnsRegistry(inner, settings)


def _tokens(settings: GatewaySettings) -> Mapping[str, ModelTokens]:
    return load_models(settings.tokenizer, settings.tokenizer_cache_bytes, click.echo)


def _run(serving: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)


def _serve_one(
    settings: GatewaySettings,
    specs: tuple[WorkerSpec, ...],
    config_file: Path | None,
    folder: Path,
    own: int,
    port: int,
    pipe: Connection,
) -> None:
    """One of several processes behind the port."""
    configure_logging(settings.log_level)
    file = read_fleet(config_file) if config_file else None
    doorkeeper = Doorkeeper(file.keys, file.tiers) if file else Doorkeeper((), {})
    board = Board(folder / "board", settings.processes, own)
    siblings = Siblings(folder, settings.processes, own)
    registry = _registry(specs, config_file, settings)
    with listen(settings.host, port, shared=True) as sock:
        _run(
            serve(
                settings,
                registry,
                doorkeeper,
                sock,
                lambda _: pipe.send(None),
                siblings,
                board,
                _tokens(settings),
            )
        )
    board.close()


def _say(settings: GatewaySettings, keyed: bool, workers: int, port: int) -> None:
    host = settings.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if look := page.address(url, host, shown=settings.ui, keyed=keyed):
        print_line(f"look: {look}")
    count = "1 worker" if workers == 1 else f"{workers} workers"
    print_line(f"gateway: {url}, {count}")


@command.command("drain")
@click.argument("worker", metavar="URL")
@click.option("--gateway", default="http://127.0.0.1:8080", show_default=True, help="its address")
@click.option("--api-key", default="", envvar="HEADRACE_GATEWAY_KEY", help="an admin's key")
@click.option("--wait-s", default=600.0, show_default=True, help="longest wait until it is empty")
@click.option("--undo", is_flag=True, help="let it take requests again")
@click.pass_context
def drain(
    ctx: click.Context, /, worker: str, gateway: str, api_key: str, wait_s: float, undo: bool
) -> None:
    """Send nothing new to the worker at URL, and wait until its requests have ended."""
    refuse_alone(ctx, [Tied("wait_s", not undo, "beside --undo, which waits for nothing")])
    deadline_s = time.monotonic() + wait_s
    while True:
        left = _tell(gateway, api_key, {"worker": worker, "drain": not undo})
        if undo or not left:
            click.echo(f"{worker} {'takes requests again' if undo else 'is empty'}")
            return
        if time.monotonic() > deadline_s:
            raise click.ClickException(f"{worker} still answers {left} requests")
        time.sleep(POLL_S)


def _tell(gateway: str, api_key: str, body: dict[str, Any]) -> int:
    """How many requests the worker still answers."""
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(
        gateway.rstrip("/") + "/gateway/drain", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(json.load(answer)["requests"])
    except urllib.error.HTTPError as error:
        raise click.ClickException(f"{gateway}: {error.read().decode()}") from None
    except OSError as error:
        why = getattr(error, "reason", error)
        raise click.ClickException(f"no gateway answers at {gateway} (--gateway): {why}") from None

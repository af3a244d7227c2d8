"""`headrace gateway`: one front for many workers; `headrace gateway drain` empties one of them."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
import typing
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import uvloop

from headrace.config import flag_of
from headrace.errors import ConfigError
from headrace.gateway.app import Gateway, serve
from headrace.gateway.registry import FileRegistry, Registry, StaticRegistry
from headrace.gateway.settings import (
    HELP,
    GatewaySettings,
    WorkerSpec,
    check_workers,
    merge,
    read_fleet,
)
from headrace.gateway.tenants import Doorkeeper
from headrace.observe.logs import configure_logging

POLL_S = 0.2


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One flag a setting."""
    hints = typing.get_type_hints(GatewaySettings)
    for field in reversed(msgspec.structs.fields(GatewaySettings)):
        flag, name, hint = flag_of(field.name), field.name, hints[field.name]
        text = f"{HELP[name]}  [default {field.default!r}]"
        if isinstance(field.default, bool):
            option = click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
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
    flags = {key: value for key, value in given.items() if value is not None}
    specs = tuple(WorkerSpec(url=url) for url in urls)
    file = read_fleet(config_file) if config_file else None
    workers = (*specs, *(file.workers if file else ()))
    check_workers(workers)
    if not workers and config_file is None:
        raise ConfigError("no workers: --worker URL, or --config FILE", param="worker")
    settings = merge(file.gateway if file else {}, flags)
    doorkeeper = Doorkeeper(file.keys, file.tiers) if file else Doorkeeper((), {})
    configure_logging(settings.log_level)
    registry: Registry = StaticRegistry(specs)
    if config_file is not None:
        registry = FileRegistry(config_file, specs)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        sock = socket.create_server(
            (settings.host, settings.port), family=family, backlog=4096, reuse_port=False
        )
    except OSError as error:
        raise ConfigError(f"{settings.host}:{settings.port}: {error}", param="port") from None
    with sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, registry, doorkeeper, sock, _say))


def _say(gateway: Gateway) -> None:
    host = gateway.settings.host
    shown = f"[{host}]" if ":" in host else host
    count = len(gateway.fleet.workers)
    print(f"gateway: http://{shown}:{gateway.port}, {count} workers", file=sys.stderr, flush=True)


@command.command("drain")
@click.argument("worker", metavar="URL")
@click.option("--gateway", default="http://127.0.0.1:8080", show_default=True, help="its address")
@click.option("--api-key", default="", envvar="HEADRACE_GATEWAY_KEY", help="an admin's key")
@click.option("--wait-s", default=600.0, show_default=True, help="longest wait until it is empty")
@click.option("--undo", is_flag=True, help="let it take requests again")
def drain(worker: str, gateway: str, api_key: str, wait_s: float, undo: bool) -> None:
    """Send nothing new to the worker at URL, and wait until its requests have ended."""
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
        raise click.ClickException(f"{gateway}: {error}") from None

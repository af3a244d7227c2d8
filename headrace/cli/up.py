"""`headrace up`: a gateway and replicas of one model on this machine, one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headrace.cli.options import read_settings, settings_options
from headrace.errors import ConfigError
from headrace.observe.logs import print_line

# Each replica gets its own, named or not: see `replicas.event_endpoints`.
SUPPLIED = {
    "kv_events_endpoint": "ipc://events",
    "kv_events_replay_endpoint": "ipc://replay",
}


@click.command("up")
@click.option(
    "--replicas", type=click.IntRange(1), default=2, show_default=True, help="of the model"
)
@click.option(
    "--fleet",
    "fleet_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="fleet file (TOML): settings of the gateway, keys and tiers; see docs/gateway.md",
)
@settings_options
def command(replicas: int, fleet_file: Path | None, config_file: Path | None, **given: Any) -> None:
    """Serve MODEL by several replicas behind one gateway.

    Takes the flags of `serve`; host, port and api-key are the gateway's, all else the replicas'.
    GPUs, or processor cores and memory, are shared out among them.
    """
    settings, sources = read_settings(config_file, given, SUPPLIED)
    from headrace.backends.choose import resolve_backend
    from headrace.cli.gateway import check_limits, run
    from headrace.gateway.settings import FleetFile, merge, read_fleet
    from headrace.gateway.tenants import Doorkeeper, KeySpec
    from headrace.launch import find_model
    from headrace.replicas import Replicas, Shares, free_ports, workers
    from headrace.runtime_folder import runtime_folder

    file = read_fleet(fleet_file) if fleet_file else FleetFile()
    if file.workers:
        raise ConfigError(f"{fleet_file}: the workers are the replicas", param="workers")
    own: dict[str, Any] = {key: getattr(settings, key) for key in ("host", "port", "ui")}
    said = {key: value for key, value in own.items() if sources[key].kind != "default"}
    admins = tuple(KeySpec(key=key, admin=True) for key in settings.api_key)
    doorkeeper = Doorkeeper((*file.keys, *admins), file.tiers)
    shares = Shares(settings, resolve_backend(settings).value, replicas)
    model = find_model(settings, print_line)  # once, before all of them want it
    if settings.prefix_caching and model.has_text:
        own["tokenizer"] = (f"{model.name}={'fake' if model.kind == 'fake' else model.path}",)
    gateway = merge(own | file.gateway, said)
    check_limits(gateway, doorkeeper)
    if gateway.processes > 1:
        raise ConfigError("replicas are started by one process alone", param="processes")
    flags = {key: getattr(settings, key) for key in sources if sources[key].kind == "flag"}
    with runtime_folder("up-") as folder, free_ports(replicas) as ports:
        specs = workers(settings, flags, config_file, model.name, shares, ports, folder)
        registry = Replicas(specs, print_line)
        run(gateway, registry, doorkeeper, registry.watch)
    if registry.failed:
        raise SystemExit(2)

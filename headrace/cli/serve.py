"""`headrace serve`: the HTTP server in front of one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headrace.cli.options import read_settings, settings_options


@click.command("serve")
@settings_options
def command(config_file: Path | None, **given: Any) -> None:
    """Serve MODEL (none: SmolLM2-135M-Instruct) over OpenAI's HTTP API."""
    settings, _ = read_settings(config_file, given)
    from headrace.launch import run_server

    raise SystemExit(run_server(settings))

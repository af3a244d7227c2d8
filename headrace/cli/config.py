"""`headrace config`: what would `serve` run with, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from headrace.cli.options import read_settings, settings_options
from headrace.config import Settings, Source


@click.command("config")
@settings_options
def command(config_file: Path | None, **given: Any) -> None:
    """Print every setting with its value and where it came from; `auto` with its outcome."""
    settings, sources = read_settings(config_file, given)
    from headrace.launch import explain

    outcomes = explain(settings)
    table = Table("setting", "value", "why", box=None, pad_edge=False)
    for key in Settings.__struct_fields__:
        value = getattr(settings, key)
        value = "(set)" if key in ("api_key", "admin_key") and value else value
        why = _origin(sources[key])
        if key in outcomes:
            value, why = f"{value} -> {outcomes[key].value}", f"{why}; {outcomes[key].reason}"
        table.add_row(key, str(value), why)
    Console(width=None if Console().is_terminal else 200).print(table)


def _origin(source: Source) -> str:
    return source.kind if not source.name else f"{source.kind} {source.name}"

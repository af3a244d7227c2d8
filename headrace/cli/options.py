"""Click options made from the one table of settings, for every command that starts an engine."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import click
import msgspec

from headrace.config import ENV_FILE, ENV_PREFIX, HELP, Settings, Source, flag_of, load

F = TypeVar("F", bound=Callable[..., Any])


def settings_options(command: F) -> F:
    """Add MODEL, `--config FILE` and one flag a setting. The command gets them as keywords."""
    hints = typing.get_type_hints(Settings)
    for field in reversed(msgspec.structs.fields(Settings)):
        if field.name != "model":
            command = _option(field.name, hints[field.name], field.default)(command)
    command = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"TOML file with the same settings (keys as the flags, less the dashes) [{ENV_FILE}]",
    )(command)
    return click.argument("model", required=False, metavar="[MODEL]")(command)


def _option(name: str, hint: Any, default: Any) -> Callable[[F], F]:
    flag, text = flag_of(name), f"{HELP[name]}  [{ENV_PREFIX}{name.upper()}; default {default!r}]"
    if isinstance(default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    if isinstance(default, tuple):
        text = f"{HELP[name]}; may be repeated  [{ENV_PREFIX}{name.upper()}, with commas]"
        return click.option(flag, name, multiple=True, metavar="text", help=text)
    if typing.get_origin(hint) is Literal:
        return click.option(flag, name, type=click.Choice(typing.get_args(hint)), help=text)
    return click.option(flag, name, type=type(default), metavar=type(default).__name__, help=text)


def read_settings(
    config_file: Path | None,
    given: dict[str, Any],
    supplied: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Settings, dict[str, Source]]:
    """Settings from the command's keywords: only what the user gave counts as a flag. `supplied`:
    see `config.load`."""
    flags = {key: v for key, v in given.items() if v is not None and v != ()}
    return load(flags, file=config_file, supplied=supplied)

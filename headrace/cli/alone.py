"""Flags that change nothing without another one: given alone they are refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import click
from click.core import ParameterSource

from headrace.config import flag_of
from headrace.errors import ConfigError


class Tied(NamedTuple):
    """`flags` (names of parameters) have an effect where `met`; `words` say when that is."""

    flags: str  # several with blanks between
    met: bool
    words: str


def _given(context: click.Context, name: str) -> bool:
    """Whether it stands on the command line; a variable of the environment is for many commands."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_alone(context: click.Context, rules: Iterable[Tied]) -> None:
    """Raise ConfigError naming the first flag on the command line that would change nothing."""
    for flags, met, words in rules:
        for name in flags.split():
            if not met and _given(context, name):
                raise ConfigError(f"{flag_of(name)} changes nothing {words}", param=name)

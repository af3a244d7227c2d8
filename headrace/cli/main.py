"""`headrace`: one subcommand a file in this folder, imported when it is used."""

from __future__ import annotations

import importlib

import click

import headrace
from headrace.errors import SetupError

COMMANDS = {
    "serve": "start the HTTP server",
    "config": "print every setting, its value and why",
    "inspect": "tell what a model is and what fits in given memory",
    "plan": "tell what fits on a device, how fast it can be and what it costs",
    "chat": "talk to a server, or start one",
    "bench": "measure an OpenAI-compatible server",
    "ablate": "switch one technique on after another and measure each",
    "sim": "try routing policies on a modelled fleet",
    "gateway": "route requests to many servers",
    "up": "serve a model by several replicas behind one gateway",
}


class _Lazy(click.Group):
    """Imports `headrace.cli.<name>` only for the command that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"headrace.cli.{name}").command
        assert isinstance(command, click.Command), f"headrace.cli.{name} has no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(headrace.__version__, prog_name="headrace")
def cli() -> None:
    """An LLM inference server behind OpenAI's HTTP API."""


def main() -> None:
    """Entry point. A SetupError is the operator's to mend: one line, exit code 2."""
    try:
        cli()
    except SetupError as error:
        click.echo(f"headrace: {error.message}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

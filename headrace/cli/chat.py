"""`headrace chat`: talk to a server in the terminal, or start one for the talk."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any

import click

from headrace.cli.alone import Tied, refuse_alone
from headrace.cli.remote import Remote
from headrace.errors import HeadraceError, SetupError

HELP = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer, Ctrl-D leaves."


class Talk:
    """A conversation: the messages so far, and what is sent with each question."""

    def __init__(self, remote: Remote, system: str = "", **fields: Any) -> None:
        self._remote, self._system, self._fields = remote, system, fields
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, question: str) -> Generator[str, None, None]:
        """Pieces of the answer.

        An answer that is stopped halfway (the iterator is closed, or interrupted) stays in the
        history as far as it came; a question that failed does not stay.
        """
        self.messages.append({"role": "user", "content": question})
        answer: list[str] = []
        try:
            for piece in self._remote.stream(self.messages, **self._fields):
                answer.append(piece)
                yield piece
        except HeadraceError:
            self.messages.pop()
            raise
        except BaseException:
            self._remember(answer)
            raise
        self._remember(answer)

    def _remember(self, answer: list[str]) -> None:
        self.messages.append({"role": "assistant", "content": "".join(answer)})


def converse(talk: Talk, read: Callable[[], str], write: Callable[[str], None]) -> None:
    """Questions and answers until `read` raises EOFError or says /exit."""
    write(HELP + "\n")
    while True:
        try:
            line = read().strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            talk.reset()
            write("(forgotten)\n")
        elif line.startswith("/"):
            write(HELP + "\n")
        elif line:
            _answer(talk, line, write)


def _answer(talk: Talk, question: str, write: Callable[[str], None]) -> None:
    try:
        with contextlib.closing(talk.ask(question)) as pieces:
            for piece in pieces:
                write(piece)
        write("\n")
    except KeyboardInterrupt:
        write("\n(stopped)\n")
    except HeadraceError as error:
        write(f"\nerror: {error.message}\n")


@contextlib.contextmanager
def _server(url: str, model: str, api_key: str) -> Iterator[Remote]:
    if url:
        yield Remote(url, model, api_key)
        return
    from headrace.cli.child_server import ChildServer

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)  # so that the server is stopped on the way out
    arguments = [model] if model else []
    if api_key:
        arguments += ["--api-key", api_key]
    with ChildServer(arguments, lambda line: click.echo(line, err=True)) as child:
        yield Remote(child.url, "", api_key)


@click.command("chat")
@click.argument("prompt", required=False)
@click.option("--url", default="", help="a running server; default: start one, stop it at the end")
@click.option("--model", default="", help="with --url its name there, else what to serve")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="sent as a bearer token")
@click.option("--system", default="", help="system message")
@click.option("--max-tokens", type=click.IntRange(1), default=None, help="longest answer")
@click.option("--temperature", type=click.FloatRange(0, 2), default=None)
@click.option("--seed", type=int, default=None)
@click.pass_context
def command(
    context: click.Context,
    /,
    prompt: str | None,
    url: str,
    model: str,
    api_key: str,
    system: str,
    **fields: Any,
) -> None:
    """Chat with a model. With PROMPT, or text piped in, answer once and leave."""
    drawn = fields["temperature"] != 0
    refuse_alone(context, [Tied("seed", drawn, "beside --temperature 0, where nothing is drawn")])
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (prompt, piped.strip()) if part)
    if not question and not sys.stdin.isatty():
        raise click.UsageError("nothing to ask: standard input is empty")
    given = {name: value for name, value in fields.items() if value is not None}

    def write(text: str) -> None:
        click.echo(text, nl=False)

    try:
        with _server(url, model, api_key) as remote:
            talk = Talk(remote, system, **given)
            if question:
                with contextlib.closing(talk.ask(question)) as pieces:
                    for piece in pieces:
                        write(piece)
                write("\n")
                return
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (line editing and history for `input`)
            converse(talk, lambda: input("> "), write)
    except SetupError:
        raise
    except HeadraceError as error:
        raise click.ClickException(error.message) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None

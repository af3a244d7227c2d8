"""The contracts of hooks. A hook is made once in each HTTP process, by a factory that gets the text
behind its name in `--hook KIND=NAME:TEXT`; it serves all requests of that process. The errors that
they may raise are in headrace/errors.py. A hook that has a method `close` is told when its process
ends.

No method may block the event loop for long: what waits is `async`, the others only compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

Action = Literal["allow", "block", "annotate"]


class Verdict(msgspec.Struct, frozen=True):
    """Of a prompt. block: the request is refused with `reason`. annotate: it goes on, and the
    response names the labels in the header `x-headrace-moderation`."""

    action: Action = "allow"
    reason: str = ""
    labels: Mapping[str, float] = {}


class Moderation(Protocol):
    """Judges what goes into the model, before anything is computed for it."""

    async def judge(self, texts: Sequence[str]) -> Verdict:
        """texts: the prompts, or the messages, tools and documents of a chat; none is empty.

        Raises HookUnavailable if there is no verdict and the request may not go on without.
        """


class Piece(msgspec.Struct, frozen=True):
    """What one `feed` gives: text to send in place of what came, and whether the answer ends here
    (finish_reason `content_filter`)."""

    text: str = ""
    stop: bool = False


class FilterStream(Protocol):
    """A feed/flush machine over one run of text of one choice: the content, the reasoning, the
    arguments of one tool call, or the name of a tool that the model made up. How the text is cut
    may not matter: hold back what is undecided."""

    def feed(self, text: str) -> Piece:
        """More text. After a `stop` nothing more is fed, and `flush` is not called."""

    def flush(self) -> Piece:
        """The run ended: the rest."""


class Filter(Protocol):
    """Changes or ends answers while they are streamed."""

    def open(self) -> FilterStream:
        """A machine for one run of text."""


class Check(Protocol):
    """Looks at the whole content of a choice before any of it is sent: such an answer comes in one
    piece, streamed or not."""

    def applies(self, form: str) -> bool:
        """Whether to check an answer of that form: "json", "regex" or "lark" where the request
        asked for structured output, else ""."""

    def check(self, text: str) -> str:
        """The text to send. Raises UnfitAnswer."""


class Asked(msgspec.Struct, frozen=True):
    """What was answered: the messages of a chat, or the prompt of a completion."""

    messages: Sequence[Mapping[str, Any]] = ()
    prompt: str = ""


class Scorer(Protocol):
    """Says how good answers are; of `best_of` choices those with the highest scores are shown."""

    async def score(self, asked: Asked, answers: Sequence[str]) -> Sequence[float]:
        """One score for each answer. Raises HookUnavailable."""


class Citation(msgspec.Struct, frozen=True):
    """`text[start:end]` of an answer rests on `quote`, text of document `document` (from 0)."""

    start: int
    end: int
    document: int
    quote: str = ""


class Citer(Protocol):
    """Links an answer to the documents of its request."""

    def cite(self, text: str, documents: Sequence[Mapping[str, Any]]) -> Sequence[Citation]:
        """documents: as the request has them. In the order of the answer."""


# KIND -> how a hook of that kind is made
Factory = Callable[[str], Any]
KINDS = ("moderation", "filter", "check", "score", "cite")

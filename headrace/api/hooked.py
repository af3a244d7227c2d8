"""Hooks on the text of one choice: filters, then checks, then citations, behind the parser's face.

Without a hook that looks at answers there is none of this: see `hooked_parser`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from headrace.hooks.contract import Check, Citation, FilterStream, Piece
from headrace.hooks.load import Hooks
from headrace.text.parts import Call, Parser, Part, Text

Documents = Sequence[Mapping[str, Any]]


def hooked_parser(
    hooks: Hooks,
    inner: Callable[[], Parser] | None,
    form: str,
    documents: Documents,
    tools: Collection[str] = (),
) -> Callable[[], Parser] | None:
    """What makes the parser of a choice; `inner` itself where no hook looks at its text.

    form: of structured output, as `Check.applies` has it. tools: names that the request brought.
    """
    checks = [check for check in hooks.check if check.applies(form)]
    if not hooks.filter and not checks and not (hooks.cite and documents):
        return inner
    return lambda: Hooked(hooks, inner() if inner else None, checks, documents, tools)


class Hooked:
    """A `Parser` around another, or around none.

    stopped: a filter ended the answer; nothing more is to be fed.
    citations: of the content, once it was flushed.
    """

    def __init__(
        self,
        hooks: Hooks,
        inner: Parser | None,
        checks: Sequence[Check],
        documents: Documents,
        tools: Collection[str],
    ) -> None:
        self._hooks, self._inner, self._checks, self._documents = hooks, inner, checks, documents
        self._tools = frozenset(tools)
        self._streams: list[FilterStream] = []  # of the run of text that is open
        self._run: Part | None = None  # its last part
        self._content: list[str] = []  # kept for checks and citations
        self._keeps = bool(checks) or bool(hooks.cite and documents)
        self._calls = False  # one began: then there need not be content
        self.stopped = False
        self.citations: list[Citation] = []

    @property
    def thinking(self) -> bool:
        return self._inner is not None and self._inner.thinking

    @property
    def may_think(self) -> bool:
        return self._inner is not None and self._inner.may_think

    @property
    def may_stop(self) -> bool:
        """A filter may end the answer."""
        return bool(self._hooks.filter)

    @property
    def called(self) -> bool:
        return self._inner is not None and self._inner.called

    def feed(self, text: str) -> list[Part]:
        """See `Parser`. Raises nothing."""
        if self._inner is not None:
            return self._filtered(self._inner.feed(text))
        return self._filtered([Text(text)] if text else [])

    def flush(self) -> list[Part]:
        """See `Parser`; also after a stop. Raises UnfitAnswer."""
        out: list[Part] = []
        if not self.stopped and self._inner is not None:
            out += self._filtered(self._inner.flush())
        if not self.stopped:
            out += self._close()
        if not self._keeps:
            return out
        content = "".join(self._content)
        for check in self._checks if content or not self._calls else ():
            content = check.check(content)
        for citer in self._hooks.cite:
            self.citations += citer.cite(content, self._documents)
        return [*out, Text(content)] if self._checks and content else out

    def _filtered(self, parts: Sequence[Part]) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if isinstance(part, Call) or type(part) is not type(self._run):
                out += self._close()
            if self.stopped:
                break
            if isinstance(part, Call):
                self._calls = True
                out += self._named(part)
                continue
            if self._run is None:
                self._streams = [one.open() for one in self._hooks.filter]
            self._run = part
            out += self._through(part.text, last=False)
        return out

    def _named(self, call: Call) -> list[Part]:
        """A call; its name goes through the filters too, as a run of its own, unless the request
        brought it. One of whose name a filter leaves nothing cannot be made, and ends the answer.
        """
        if not self._hooks.filter or call.name in self._tools:
            return [call]
        self._streams = [one.open() for one in self._hooks.filter]
        name = self._filter(call.name, last=True)
        self.stopped |= not name
        return [] if self.stopped else [msgspec.structs.replace(call, name=name)]

    def _close(self) -> list[Part]:
        """The end of a run of text of one kind: what its filters hold back."""
        out = self._through("", last=True) if self._run is not None else []
        self._run = None
        return out

    def _through(self, text: str, *, last: bool) -> list[Part]:
        """More of the open run, through the filters."""
        text = self._filter(text, last=last)
        assert self._run is not None, "a run is open"
        if not text:
            return []
        if isinstance(self._run, Text) and self._keeps:
            self._content.append(text)
            if self._checks:
                return []
        return [msgspec.structs.replace(self._run, text=text)]

    def _filter(self, text: str, *, last: bool) -> str:
        """Text through the filters, in their order. Where one stops, what the next gets ends."""
        for stream in self._streams:
            piece = stream.feed(text) if text else Piece()
            text = piece.text
            if piece.stop:
                last = self.stopped = True
            elif last:
                rest = stream.flush()
                text += rest.text
                self.stopped |= rest.stop
        return text


def annotated(citations: Sequence[Citation], documents: Documents) -> list[dict[str, Any]]:
    """Citations in the shape of OpenAI's `url_citation`; indices count characters of content."""
    return [
        {
            "type": "document_citation",
            "document_citation": {
                "start_index": one.start,
                "end_index": one.end,
                "document_index": one.document,
                **{
                    name: documents[one.document][name]
                    for name in ("id", "title", "url")
                    if isinstance(documents[one.document].get(name), str)
                },
                "quote": one.quote,
            },
        }
        for one in citations
    ]

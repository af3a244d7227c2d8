"""OpenAI's chunks: what chat and completions write into a stream.

The pieces of a chunk that never change are encoded once a choice; a token then costs one JSON
string and a few joins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.api.answer import Answer, Reply
from headrace.api.events import Events
from headrace.api.logprobs import Entry, Reporter
from headrace.api.prepare import Shown
from headrace.text.parts import Part, Text

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Chunks(Events):
    """The bytes of one protocol's stream. Subclasses name the object and shape a choice.

    `before` and `after` surround the JSON string of a delta's text.
    """

    object = ""
    before = b""
    after = b""
    roles = False  # each choice starts with a role chunk

    def __init__(
        self,
        reply: Reply,
        n_choices: int,
        reporter: Reporter | None = None,
        shown: Shown | None = None,
    ) -> None:
        self._reporter, self._shown = reporter, shown or Shown()
        head = _encode(
            {
                "id": reply.id,
                "object": self.object,
                "created": reply.created,
                "model": reply.model,
                "system_fingerprint": reply.system_fingerprint,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._include_usage = reply.include_usage
        self.continuous_usage = reply.continuous_usage
        # OpenAI: with include_usage, every chunk but the last has a null usage.
        self._tail = b',"usage":null}\n\n' if reply.include_usage else b"}\n\n"
        self._texts = [self._open(index) + self.before for index in range(n_choices)]
        self._text_end = self.after + b"]" + self._tail

    def begin(self, answer: Answer) -> list[bytes]:
        """The role chunks of all choices."""
        return [self.role(choice.index) for choice in answer.choices] if self.roles else []

    def text(self, index: int, text: str) -> bytes:
        """New text of a choice."""
        return self._texts[index] + _encode(text) + self._text_end

    def parts(self, index: int, parts: Sequence[Part]) -> list[bytes]:
        """New parts of a choice, a chunk each."""
        open_ = self._open(index)
        return [
            open_ + self._close({**self.delta(part), "logprobs": None, "finish_reason": None})
            for part in parts
        ]

    def told(
        self, index: int, parts: Sequence[Part], entries: list[Entry], offset: int
    ) -> list[bytes]:
        """As `parts`, with what is said of tokens in the first chunk. offset: characters of the
        choice so far that `entries` do not count: its echo."""
        first: dict[str, Any] = {
            **self.delta(parts[0] if parts else None),
            "logprobs": None,
            "finish_reason": None,
        }
        if self._shown.top >= 0:
            assert self._reporter is not None, "nobody to write log-probabilities down"
            first["logprobs"] = self.logprobs(self._reporter, entries, self._shown.top, offset)
        if self._shown.token_ids:
            first["token_ids"] = [span.token for span, _ in entries]
        return [self._open(index) + self._close(first), *self.parts(index, parts[1:])]

    def echoed(self, entries: list[Entry]) -> dict[str, Any] | None:
        """The `logprobs` of an echo; None where nothing is asked."""
        if not entries:
            return None
        assert self._reporter is not None, "nobody to write log-probabilities down"
        return self.logprobs(self._reporter, entries, self._shown.top, 0)

    def opened(
        self, index: int, echo: str, logprobs: dict[str, Any] | None, prompt: list[int]
    ) -> bytes:
        """What goes before a choice's own text: an echo, ids of the prompt; b"" if nothing."""
        ids = self._shown.token_ids
        if not (echo or ids):
            return b""
        rest: dict[str, Any] = {
            **self.delta(Text(echo)),
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if ids:
            rest |= {"token_ids": [], "prompt_token_ids": prompt}
        return self._open(index) + self._close(rest)

    @staticmethod
    def delta(part: Part | None) -> dict[str, Any]:
        """The members of a choice that hold a part; None: nothing new."""
        raise NotImplementedError

    @staticmethod
    def logprobs(
        reporter: Reporter, entries: list[Entry], count: int, offset: int
    ) -> dict[str, Any]:
        """The `logprobs` of a choice."""
        raise NotImplementedError

    def role(self, index: int) -> bytes:
        """The first chunk of a choice, in protocols that have one."""
        raise NotImplementedError

    def end(self, answer: Answer) -> bytes:
        """The usage chunk if it is asked for, and [DONE]."""
        return (self.usage(answer.usage()) if self._include_usage else b"") + DONE

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The chunk with no choices, before [DONE]."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def with_usage(self, chunk: bytes, usage: Mapping[str, Any]) -> bytes:
        """A chunk of ours with the counts so far instead of null."""
        assert chunk.endswith(self._tail), "a chunk made by this object"
        return chunk[: -len(self._tail)] + b',"usage":' + _encode(usage) + b"}\n\n"

    def beside(self, chunk: bytes, name: str, value: Any) -> bytes:
        """A chunk of ours with one more member beside its choices."""
        member = b',"' + name.encode() + b'":' + _encode(value)
        return chunk[: -len(self._tail)] + member + self._tail

    def _open(self, index: int) -> bytes:
        return self._head + b'{"index":%d,' % index

    def _close(self, rest: Mapping[str, Any]) -> bytes:
        """The end of a choice whose object goes on with the members of `rest`."""
        return _encode(rest)[1:] + b"]" + self._tail

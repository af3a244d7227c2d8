"""What an answer says of tokens: log-probabilities in OpenAI's two forms and in vLLM's, and ids.

One entry a token, in every form: also for tokens that show nothing. A token's `bytes` are those
that it adds to the text (null if it is not shown), so that over an answer they add up to it; its
name is its own text, with bytes that are not whole characters written \\xNN as OpenAI does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.messages import Logprobs
from headrace.text.tokenizer import Tokenizer
from headrace.text.trace import Span, bytes_of, label

LEAST = -9999.0  # JSON has no -inf; OpenAI and vLLM say this for what is all but impossible
_INLINE_ENTRIES = 512  # more are written in a thread: nobody else's stream waits for them


class Entry(NamedTuple):
    """A token of an answer or of an echoed prompt. `said`: None for a prompt's first token, and
    where log-probabilities were not asked for."""

    span: Span
    said: Logprobs | None


def finite(logprob: float) -> float:
    """A number for JSON; NaN, of a model whose logits are broken, counts as impossible."""
    return logprob if logprob > LEAST else LEAST


class Reporter:
    """Writes entries down. `skip_special`: special tokens are not part of the text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()

    def chat(self, entries: Sequence[Entry], count: int) -> dict[str, Any]:
        """Of /v1/chat/completions."""
        return {"content": [self._content(entry, count) for entry in entries], "refusal": None}

    def _content(self, entry: Entry, count: int) -> dict[str, Any]:
        span, said = entry
        assert said is not None, "a token of a chat answer without its log-probability"
        pairs = zip(said.top_ids[:count], said.top, strict=False)
        return {
            "token": label(self._tokenizer, span.token, first=span.first),
            "logprob": finite(said.logprob),
            "bytes": None if span.raw is None else list(span.raw),
            "top_logprobs": [self._other(token, value, span.first) for token, value in pairs],
        }

    def _other(self, token: int, logprob: float, first: bool) -> dict[str, Any]:
        raw = b"" if token in self._hidden else bytes_of(self._tokenizer, token, first=first)
        return {
            "token": label(self._tokenizer, token, first=first),
            "logprob": finite(logprob),
            "bytes": list(raw) if raw else None,
        }

    def completion(self, entries: Sequence[Entry], count: int, offset: int) -> dict[str, Any]:
        """Of /v1/completions. `offset`: characters of the text before the first span's text."""
        return {
            "tokens": [self._name(span.token, span.first) for span, _ in entries],
            "token_logprobs": [said and finite(said.logprob) for _, said in entries],
            "top_logprobs": [said and self._table(span, said, count) for span, said in entries],
            "text_offset": [offset + span.start for span, _ in entries],
        }

    def _table(self, span: Span, said: Logprobs, count: int) -> dict[str, float]:
        """Names of the most likely tokens and of the one that stands there. Of tokens with one
        name the likeliest stays."""
        out: dict[str, float] = {}
        for token, value in zip(said.top_ids[:count], said.top, strict=False):
            out.setdefault(self._name(token, span.first), finite(value))
        out.setdefault(self._name(span.token, span.first), finite(said.logprob))
        return out

    def _name(self, token: int, first: bool) -> str:
        """As `label`; this form has no bytes, so names of incomplete characters say so."""
        raw = bytes_of(self._tokenizer, token, first=first)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + raw.decode("utf-8", "backslashreplace")
        return label(self._tokenizer, token, first=first)

    def prompt(self, ids: Sequence[int], said: Sequence[Logprobs], count: int) -> msgspec.Raw:
        """vLLM's prompt_logprobs: null, then a table a token, its own entry first."""
        assert len(said) == len(ids) - 1, "one report for each prompt token after the first"
        tables: list[dict[str, Any] | None] = [None]
        for token, one in zip(ids[1:], said, strict=True):
            table = {str(token): self._ranked(token, one.logprob, one.rank)}
            for rank, (other, value) in enumerate(zip(one.top_ids, one.top, strict=True), 1):
                if rank <= count and other != token:
                    table[str(other)] = self._ranked(other, value, rank)
            tables.append(table)
        return msgspec.Raw(msgspec.json.encode(tables))

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": label(self._tokenizer, token),
        }

    async def prompts(
        self, prompts: Sequence[Sequence[int]], said: Sequence[Sequence[Logprobs]], count: int
    ) -> list[msgspec.Raw]:
        """`prompt` of each, out of the way of others when it is long."""

        def write() -> list[msgspec.Raw]:
            pairs = zip(prompts, said, strict=True)
            return [self.prompt(ids, one, count) for ids, one in pairs]

        small = sum(len(ids) for ids in prompts) * (count + 1) <= _INLINE_ENTRIES
        return write() if small else await asyncio.to_thread(write)

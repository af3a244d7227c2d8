"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.api.admission import admit
from headrace.api.answer import Choice
from headrace.api.body import read_body
from headrace.api.chunks import Chunks
from headrace.api.exchange import exchange_of
from headrace.api.generate import respond
from headrace.api.logprobs import Entry, Reporter
from headrace.api.prepare import prepare_completion
from headrace.api.schemas import Completion, parse
from headrace.api.service import service_of
from headrace.text.parts import Part, Said, Text


class CompletionChunks(Chunks):
    """text_completion objects."""

    object = "text_completion"
    before = b'"text":'
    after = b',"logprobs":null,"finish_reason":null}'

    @staticmethod
    def delta(part: Part | None) -> dict[str, Any]:
        """New text."""
        assert part is None or isinstance(part, Text), "completions have no parser"
        return {"text": part.text if part else ""}

    @staticmethod
    def logprobs(
        reporter: Reporter, entries: list[Entry], count: int, offset: int
    ) -> dict[str, Any]:
        """Of a choice, streamed or not."""
        return reporter.completion(entries, count, offset)

    def finish(self, index: int, reason: str, stop_reason: str | int | None) -> bytes:
        """The last chunk of a choice."""
        rest = {"text": "", "logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}
        return self._open(index) + self._close(rest)


def whole_choice(choice: Choice, all_said: Said, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """One choice of a response that is not streamed."""
    return {
        "index": choice.index,
        "text": all_said.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
    }


async def completions(request: Request) -> ASGIApp:
    """Tokenise, run, answer. Raises the errors of body, schemas, admission and prepare."""
    service = service_of(request)
    raw, size_bytes = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Completion, raw, strict=service.settings.strict)
    info = admit(service, body)
    prepared = await prepare_completion(
        service, body, info, size_bytes, exchange_of(request).record
    )
    return await respond(
        request,
        service,
        body,
        prepared,
        unknown,
        prefix="cmpl",
        kind="text_completion",
        chunks=CompletionChunks,
        whole=whole_choice,
    )

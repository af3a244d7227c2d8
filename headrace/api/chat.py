"""POST /v1/chat/completions."""

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
from headrace.api.prepare import prepare_chat
from headrace.api.schemas import Chat, parse
from headrace.api.service import service_of
from headrace.text.parts import Call, Part, Reasoning, Said, Text


class ChatChunks(Chunks):
    """chat.completion.chunk objects."""

    object = "chat.completion.chunk"
    before = b'"delta":{"content":'
    after = b'},"logprobs":null,"finish_reason":null}'
    roles = True

    @staticmethod
    def delta(part: Part | None) -> dict[str, Any]:
        """OpenAI's delta; reasoning goes by both of the names that clients look for."""
        if part is None:
            return {"delta": {"content": ""}}
        if isinstance(part, Text):
            return {"delta": {"content": part.text}}
        if isinstance(part, Reasoning):
            return {"delta": {"reasoning": part.text, "reasoning_content": part.text}}
        call: dict[str, Any] = {"index": part.index}
        if isinstance(part, Call):
            function = {"name": part.name, "arguments": ""}
            call |= {"id": part.id, "type": "function", "function": function}
        else:
            call["function"] = {"arguments": part.text}
        return {"delta": {"tool_calls": [call]}}

    @staticmethod
    def logprobs(
        reporter: Reporter, entries: list[Entry], count: int, offset: int
    ) -> dict[str, Any]:
        """Of a choice, streamed or not."""
        return reporter.chat(entries, count)

    def opened(
        self, index: int, echo: str, logprobs: dict[str, Any] | None, prompt: list[int]
    ) -> bytes:
        """The prompt's ids, in the first choice's chunk and beside it, as vLLM has them."""
        if index:
            return b""
        rest = {**self.delta(None), "logprobs": None, "finish_reason": None, "token_ids": []}
        return self.beside(self._open(index) + self._close(rest), "prompt_token_ids", prompt)

    def role(self, index: int) -> bytes:
        """The first chunk of a choice."""
        delta = {"role": "assistant", "content": ""}
        rest = {"delta": delta, "logprobs": None, "finish_reason": None}
        return self._open(index) + self._close(rest)

    def cited(self, index: int, annotations: list[dict[str, Any]]) -> bytes:
        """Citations, in a delta as in a message."""
        rest = {"delta": {"annotations": annotations}, "logprobs": None, "finish_reason": None}
        return self._open(index) + self._close(rest)

    def finish(self, index: int, reason: str, stop_reason: str | int | None) -> bytes:
        """The last chunk of a choice."""
        rest: dict[str, Any] = {
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }
        return self._open(index) + self._close(rest)


def whole_choice(choice: Choice, all_said: Said, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """One choice of a response that is not streamed. `content` is null where the model only
    thought or called."""
    other = all_said.reasoning or all_said.calls
    message: dict[str, Any] = {
        "role": "assistant",
        "content": all_said.text or (None if other else ""),
        "refusal": None,
    }
    if all_said.reasoning:
        message |= {"reasoning": all_said.reasoning, "reasoning_content": all_said.reasoning}
    if choice.annotations:
        message["annotations"] = choice.annotations
    if all_said.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in all_said.calls
        ]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
    }


async def chat_completions(request: Request) -> ASGIApp:
    """Render, run, answer. Raises the errors of body, schemas, admission and prepare."""
    service = service_of(request)
    raw, size_bytes = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Chat, raw, strict=service.settings.strict)
    info = admit(service, body)
    prepared = await prepare_chat(service, body, info, size_bytes, exchange_of(request).record)
    return await respond(
        request,
        service,
        body,
        prepared,
        unknown,
        prefix="chatcmpl",
        kind="chat.completion",
        chunks=ChatChunks,
        whole=whole_choice,
    )

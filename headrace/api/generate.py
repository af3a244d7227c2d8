"""What chat and completions do alike once a request is prepared: submit, then stream or collect."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.api.answer import Answer, Choice, Reply
from headrace.api.exchange import exchange_of
from headrace.api.prepare import Prepared
from headrace.api.schemas import Generation, StreamOptions
from headrace.api.service import Service, encode_json
from headrace.api.stream import Chunks, EventStream, watch_client
from headrace.errors import ShuttingDown

log = logging.getLogger("headrace.api")

IGNORED = "x-headrace-ignored-fields"

Whole = Callable[[Choice, str], dict[str, Any]]  # a choice of a response that is not streamed


async def respond(
    request: Request,
    service: Service,
    body: Generation,
    prepared: Prepared,
    unknown: Sequence[str],
    *,
    prefix: str,
    kind: str,
    chunks: type[Chunks],
    whole: Whole,
) -> ASGIApp:
    """Submit and answer. Raises what the engine refuses before anything was sent."""
    exchange = exchange_of(request)
    if service.draining:  # it may have begun while we tokenised
        raise ShuttingDown("the server is shutting down")
    options = body.stream_options or StreamOptions()
    reply = Reply(
        id=f"{prefix}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=service.name,
        system_fingerprint=service.fingerprint,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
    )
    headers = ignored(unknown)
    tokens = service.client.submit(prepared.jobs, exchange.arrived_s)
    answer = Answer(service, prepared, tokens)
    if body.stream:
        events = chunks(reply, len(answer.choices))
        return EventStream(answer, events, reply, exchange, service.metrics, headers)
    async with tokens, watch_client(request.receive, tokens):
        exchange.tokens = tokens
        try:
            texts = await answer.collect()
        finally:
            exchange.detail = answer.summary()
    if prepared.echo:
        texts = [prepared.echo[i // prepared.n] + text for i, text in enumerate(texts)]
    content = {
        "id": reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": reply.system_fingerprint,
        "choices": [
            whole(choice, text) for choice, text in zip(answer.choices, texts, strict=True)
        ],
        "usage": answer.usage(),
    }
    return Response(encode_json(content), headers=headers, media_type="application/json")


def ignored(unknown: Sequence[str]) -> dict[str, str]:
    """The header that names fields nobody knows; also logged."""
    if not unknown:
        return {}
    names = ", ".join(name if name.isascii() and name.isprintable() else "?" for name in unknown)
    log.info("ignored fields: %s", names[:500])
    return {IGNORED: names[:500]}

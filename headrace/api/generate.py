"""What protocols do alike once a request is prepared: submit, then stream or collect."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.api.answer import Answer, Choice, Reply
from headrace.api.beams import BeamStream
from headrace.api.chunks import Chunks
from headrace.api.events import Events
from headrace.api.exchange import Exchange, exchange_of
from headrace.api.hook_calls import heard
from headrace.api.logprobs import Reporter
from headrace.api.metering import NO_OUTPUT
from headrace.api.moderate import labelled
from headrace.api.prepare import Prepared
from headrace.api.record import Full
from headrace.api.schemas import Generation, StreamOptions
from headrace.api.service import Service, encode_json
from headrace.api.stream import EventStream, watch_client
from headrace.engine.token_stream import Account, TokenStream
from headrace.errors import RequestFailed, ShuttingDown
from headrace.text.parts import Part, Said, Text, said

log = logging.getLogger("headrace.api")

IGNORED = "x-headrace-ignored-fields"

# A choice of a response that is not streamed: itself, what it says, its logprobs.
Whole = Callable[[Choice, Said, dict[str, Any] | None], dict[str, Any]]


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
    """Answer a body of chat or completions. Raises as `answered`."""
    options = body.stream_options or StreamOptions()
    reply = Reply(
        id=f"{prefix}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=service.name,
        system_fingerprint=service.fingerprint,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
    )
    reporter = Reporter(service.tokenizer, skip_special=prepared.skip_special)

    def events(answer: Answer) -> Events:
        return chunks(reply, len(answer.choices), reporter, prepared.shown)

    async def content(answer: Answer, parts: list[list[Part]]) -> dict[str, Any]:
        return {
            "id": reply.id,
            "object": kind,
            "created": reply.created,
            "model": reply.model,
            "system_fingerprint": reply.system_fingerprint,
            **await whole_answer(answer, parts, reporter, chunks, whole),
            "usage": answer.usage(),
        }

    streamed = events if body.stream else None
    return await answered(request, service, prepared, unknown, events=streamed, content=content)


async def answered(
    request: Request,
    service: Service,
    prepared: Prepared,
    unknown: Sequence[str],
    *,
    events: Callable[[Answer], Events] | None,
    content: Callable[[Answer, list[list[Part]]], Awaitable[dict[str, Any]]],
) -> ASGIApp:
    """Submit and answer: the one engine call of every protocol.

    events: what writes a stream; None: the answer is not streamed. content: the body of an answer
    that is not, from the `joined` parts of each choice. unknown: fields that nobody knows.

    Raises what the engine refuses before anything was sent.
    """
    exchange = exchange_of(request)
    if service.draining:  # it may have begun while we tokenised
        raise ShuttingDown("the server is shutting down")
    headers = ignored([*unknown, *prepared.ignored]) | labelled(prepared.labels)
    bill = service.meter.open(exchange, prepared.user, prepared.jobs, prepared.prompt_tokens)
    record = exchange.record
    if record is not None:
        prompts = [job.prompt for job in prepared.jobs]
        record.submitted(prompts, prepared.drawn, bill)
    full = None if record is None else record.full
    with bill.covering(NO_OUTPUT):
        tokens = start(service, prepared, exchange.arrived_s, bill, full)
    answer = Answer(service, prepared, tokens, full)
    if record is not None:
        record.follow(tokens, answer)
    if service.settings.usage_details:
        answer.bill = bill
    if events is not None:
        writer = events(answer)

        def stream(exchange: Exchange) -> ASGIApp:
            return EventStream(answer, writer, exchange, service.metrics, headers, bill)

        return service.streams.resumable(request, exchange, tokens, stream)
    with bill.covering(answer):
        async with tokens, watch_client(request.receive, tokens):
            exchange.tokens = tokens
            try:
                parts = await answer.collect()
                if service.hooks.score and prepared.drawn > prepared.n:
                    await rank(service, answer, parts)
            finally:
                exchange.detail = answer.summary()
        body = encode_json(await content(answer, parts))
        await bill.close(answer)
    return Response(body, headers=headers, media_type="application/json")


def start(
    service: Service,
    prepared: Prepared,
    arrived_s: float,
    account: Account,
    full: Full | None = None,
) -> TokenStream:
    """Submit, or begin a search, which is not recorded step by step."""
    if prepared.beams is None:
        return service.client.submit(prepared.jobs, arrived_s, account, full)
    if full is not None:
        full.cut = "the steps of a beam search are not recorded"
    search = BeamStream(service.client, prepared.jobs, prepared.beams, prepared.n, arrived_s)
    search.account = account
    return search


async def rank(service: Service, answer: Answer, parts: list[list[Part]]) -> None:
    """Have the scoring hook say how good each choice is. Raises HookUnavailable, RequestFailed."""
    (scorer,), drawn = service.hooks.score, answer.prepared.drawn
    texts = [said(own).text for own in parts]
    for position, asked in enumerate(answer.prepared.asked):
        places = slice(position * drawn, (position + 1) * drawn)
        scores = await heard(service, "score", scorer.score(asked, texts[places]))
        if not all(map(math.isfinite, scores)):
            raise RequestFailed("a scoring hook gave what is no score")
        service.metrics.count_hook("score", "scored")
        for choice, score in zip(answer.choices[places], scores, strict=True):
            choice.rank = score


async def whole_answer(
    answer: Answer,
    parts: list[list[Part]],
    reporter: Reporter,
    chunks: type[Chunks],
    whole: Whole,
) -> dict[str, Any]:
    """The choices of a response that is not streamed, and what is said of its prompts.

    vLLM puts the latter beside the choices of a chat, and into each choice of completions.
    """
    shown, prepared = answer.prepared.shown, answer.prepared
    ids = [job.prompt for job in prepared.jobs]
    beside: list[dict[str, Any]] = [{} for _ in ids]
    if shown.prompt_top >= 0:
        reports = [answer.said_of_prompt(position) for position in range(len(ids))]
        for prompt, table in zip(
            beside, await reporter.prompts(ids, reports, shown.prompt_top), strict=True
        ):
            prompt["prompt_logprobs"] = table
    if shown.token_ids:
        for prompt, known in zip(beside, ids, strict=True):
            prompt["prompt_token_ids"] = known

    def echoes() -> list[dict[str, Any]]:
        """Each once, however many choices show it."""
        places = range(len(shown.echo))
        return [chunks.logprobs(reporter, answer.echoed(i), shown.top, 0) for i in places]

    echoed = await asyncio.to_thread(echoes) if shown.echo else []
    choices = []
    for choice, own in answer.best(parts):
        position = choice.index // prepared.n
        echo, logprobs = answer.echo(position), None
        if shown.top >= 0:
            logprobs = chunks.logprobs(reporter, choice.entries, shown.top, len(echo))
            if echoed:
                before = echoed[position]
                logprobs = {name: before[name] + values for name, values in logprobs.items()}
        made = whole(choice, said([Text(echo), *own]), logprobs)
        if choice.rank is not None:
            made["score"] = choice.rank
        if shown.token_ids:
            made["token_ids"] = [span.token for span, _ in choice.entries]
        choices.append(made if chunks.roles else made | beside[position])
    return {"choices": choices, **(beside[0] if chunks.roles else {})}


def ignored(unknown: Sequence[str]) -> dict[str, str]:
    """The header that names fields nobody knows; also logged."""
    if not unknown:
        return {}
    names = ", ".join(name if name.isascii() and name.isprintable() else "?" for name in unknown)
    log.info("ignored fields: %s", names[:500])
    return {IGNORED: names[:500]}

"""POST /v1/responses, GET and DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items."""

from __future__ import annotations

import logging
import sqlite3
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.api.admission import admit
from headrace.api.answer import Answer
from headrace.api.as_chat import as_chat, renamed
from headrace.api.body import read_body
from headrace.api.events import Events
from headrace.api.exchange import exchange_of
from headrace.api.generate import answered
from headrace.api.logprobs import Reporter
from headrace.api.prepare import Prepared, prepare_chat
from headrace.api.response_items import NAMES, Responses, chat_fields
from headrace.api.response_output import Output, Reply, ResponseEvents, logprobs_of
from headrace.api.response_store import Kept
from headrace.api.schemas import parse
from headrace.api.service import Service, encode_json, named, service_of
from headrace.errors import InvalidRequest, NotFound
from headrace.homes import HEADER, given_tag, response_id
from headrace.text.parts import Part, Text
from headrace.text.response_prompt import input_items

log = logging.getLogger("headrace.api")

MAX_LISTED = 100


async def create(request: Request) -> ASGIApp:
    """Answer. Raises the errors of body, schemas, admission and prepare."""
    service = service_of(request)
    raw, size_bytes = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Responses, raw, strict=service.settings.strict)
    if body.store and not service.responses.enabled:
        raise InvalidRequest("store: this server keeps no responses", param="store")
    items = input_items(body.input)
    before, before_bytes = await _before(service, body)
    if not before and not items:
        raise InvalidRequest("input is required", param="input")
    with renamed(NAMES):
        chat = as_chat(raw, chat_fields(body, [*before, *items]))
        info = admit(service, chat)
        prepared = await prepare_chat(
            service, chat, info, size_bytes + before_bytes, exchange_of(request).record
        )
    if body.logprobs and prepared.parser is not None:
        raise InvalidRequest(
            "include: log-probabilities are of plain text, not beside tools or reasoning",
            param="include",
        )
    name = response_id(given_tag(request.headers.get(HEADER)))
    reply = Reply(name, _fixed(service, body, prepared))
    reporter = Reporter(service.tokenizer, skip_special=prepared.skip_special)

    async def save(answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
        ended = reply.ended(answer, output, stored=reply.fixed["store"])
        if not ended["store"]:
            return ended
        context = encode_json([*before, *items, *output])
        kept = Kept(encode_json(ended), encode_json(items), context)
        return ended | {"store": await _put(service, reply.id, kept)}

    def events(answer: Answer) -> Events:
        return ResponseEvents(reply, reporter, body.top_logprobs or 0, save)

    async def content(answer: Answer, parts: list[list[Part]]) -> dict[str, Any]:
        output, choice = Output(), answer.choices[0]
        assert choice.finish is not None, "collect waits for the end"
        said = logprobs_of(reporter, choice.take(), body.top_logprobs or 0) if body.logprobs else []
        for part in parts[0] or ([Text("")] if said else []):
            output.add(part, said)
        output.close(choice.finish)
        return await save(answer, output.items)

    streamed = events if body.stream else None
    return await answered(request, service, prepared, unknown, events=streamed, content=content)


async def _before(service: Service, body: Responses) -> tuple[list[dict[str, Any]], int]:
    """The conversation that this one goes on with, and its bytes as JSON."""
    name = body.previous_response_id
    if name is None:
        return [], 0
    if body.prompt_ids is not None:
        raise InvalidRequest(
            "prompt_ids and previous_response_id exclude each other", param="prompt_ids"
        )
    kept = await service.responses.get(name)
    if kept is None:
        raise InvalidRequest(
            f"no response {name!r} is kept here (any more)",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return msgspec.json.decode(kept.context), len(kept.context)


async def _put(service: Service, name: str, kept: Kept) -> bool:
    """Whether it is kept; an answer is not lost over that."""
    try:
        return await service.responses.put(name, kept)
    except sqlite3.Error:
        log.exception("a response could not be kept")
        return False


def _fixed(service: Service, body: Responses, prepared: Prepared) -> dict[str, Any]:
    """Members of the object that repeat the request, with defaults filled in."""
    sampling, text = prepared.jobs[0].sampling, body.text
    form = text.format if text and text.format else None
    said = {k: v for k, v in msgspec.structs.asdict(form).items() if v is not None} if form else {}
    return {
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": service.responses.enabled if body.store is None else body.store,
        "temperature": sampling.temperature,
        "text": {"format": said or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


async def retrieve(request: Request) -> Response:
    """The object as it was at its end. Raises NotFound, InvalidRequest."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequest("stream: a kept response is not streamed again", param="stream")
    kept = await _kept(request)
    return Response(kept.body, media_type="application/json")


async def delete(request: Request) -> Response:
    """Forget one. Raises NotFound."""
    name = named(request)
    if not await service_of(request).responses.delete(name):
        raise _missing(name)
    content = {"id": name, "object": "response", "deleted": True}
    return Response(encode_json(content), media_type="application/json")


async def list_input(request: Request) -> Response:
    """The items that the request of a response brought, newest first unless `order=asc`."""
    query = request.query_params
    try:
        limit = int(query.get("limit", "20"))
    except ValueError:
        limit = 0
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidRequest(f"limit: a number from 1 to {MAX_LISTED}", param="limit")
    if query.get("order", "desc") not in ("asc", "desc"):
        raise InvalidRequest("order: asc or desc", param="order")
    items = msgspec.json.decode((await _kept(request)).input)
    if query.get("order", "desc") == "desc":
        items.reverse()
    names = [item["id"] for item in items]
    if after := query.get("after"):
        if after not in names:
            raise InvalidRequest(f"after: no item {after!r}", param="after")
        items = items[names.index(after) + 1 :]
    page = items[:limit]
    content = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
    return Response(encode_json(content), media_type="application/json")


async def _kept(request: Request) -> Kept:
    name = named(request)
    kept = await service_of(request).responses.get(name)
    if kept is None:
        raise _missing(name)
    return kept


def _missing(name: str) -> NotFound:
    return NotFound(f"no response {name!r} is kept here (any more)", code="response_not_found")

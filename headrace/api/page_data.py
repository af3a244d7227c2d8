"""GET /ui/api/...: what the live page shows. docs/recording.md has the shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.api.exchange import exchange_of
from headrace.api.page import DATA, guarded
from headrace.api.service import Service, encode_json, named, service_of
from headrace.errors import Busy, InvalidRequest, NotFound
from headrace.observe.current import current
from headrace.stages import STAGES

SHOWN = 50  # requests, where nobody says how many
MOST_SHOWN = 1000
MOST_WATCHERS = 16  # live streams of one HTTP process
NO_STORE = {
    "cache-control": "no-store",  # prompts of people
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}


UNANSWERED = "x-headrace-unanswered"  # HTTP processes whose requests are missing in a list


def _json(content: Any, more: Mapping[str, str] = {}) -> Response:
    raw = content if isinstance(content, bytes) else encode_json(content)
    return Response(raw, headers={**NO_STORE, **more}, media_type="application/json")


async def stages(request: Request) -> Response:
    """The eleven stages, each with what its metric says now."""
    service = service_of(request)
    names = frozenset(stage.metric for stage in STAGES if stage.metric)
    now = await asyncio.to_thread(current, names, service.metrics.reading)
    return _json(
        [msgspec.to_builtins(stage) | {"value": now.get(stage.metric)} for stage in STAGES]
    )


async def requests(request: Request) -> Response:
    """Light records, newest first; with API keys those of the key that asks, unless it is an
    admin's. Raises InvalidRequest."""
    given = request.query_params.get("limit", str(SHOWN))
    digits = len(str(MOST_SHOWN))
    plain = given.isascii() and given.isdigit() and len(given) <= digits
    if not plain or not 0 < int(given) <= MOST_SHOWN:
        raise InvalidRequest(f"limit = {given!r:.50}: 1 to {MOST_SHOWN}", param="limit")
    listed, silent = await service_of(request).records.newest(int(given), _whose(request))
    return _json(listed, {UNANSWERED: str(silent)} if silent else {})


async def one(request: Request) -> Response:
    """One record, by its key or its request's id. Raises NotFound."""
    name = named(request)
    found, silent = await service_of(request).records.find(name, _whose(request))
    if found is None:
        missing = f"; HTTP processes that did not answer: {silent}" if silent else ""
        raise NotFound(
            f"no request {name!r:.150} is in the ring (any more){missing}",
            code="request_not_found",
        )
    return _json(found)


async def live(request: Request) -> Response:
    """The engine, twice a second, until the client leaves or the server drains. Raises Busy."""
    service = service_of(request)
    if service.watchers >= MOST_WATCHERS:
        raise Busy(f"{MOST_WATCHERS} watch already")
    service.client.require()
    headers = {**NO_STORE, "x-accel-buffering": "no"}
    events = service.live.events(lambda: service.draining)
    return _Watch(service, events, headers=headers, media_type="text/event-stream")


class _Watch(StreamingResponse):
    """Counts from when it is made: others that come before its first byte see it."""

    def __init__(self, service: Service, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._service = service
        service.watchers += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.watchers -= 1


async def kv(request: Request) -> Response:
    """The KV map: a byte a block. Raises NotReady, EngineDead."""
    view = await service_of(request).live.view(states=True)
    shown = {"blocks": view.kv_blocks, "block_size": view.block_size, "state": view.states}
    return _json(shown)


def _whose(request: Request) -> str:
    """The key whose requests may be seen; "": all."""
    exchange = exchange_of(request)
    return "" if exchange.admin else exchange.key


ROUTES = (
    Route(DATA + "stages", guarded(stages), include_in_schema=False),
    Route(DATA + "requests", guarded(requests), include_in_schema=False),
    Route(DATA + "requests/{id:path}", guarded(one), include_in_schema=False),
    Route(DATA + "live", guarded(live), include_in_schema=False),
    Route(DATA + "kv", guarded(kv), include_in_schema=False),
)

"""The routes and the lifespan; everything else is in the file named after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.api import (
    chat,
    classify,
    completions,
    embeddings,
    health,
    messages,
    models,
    openapi,
    page,
    page_data,
    relay,
    responses,
    score,
    tokenize,
)
from headrace.api.edge import Edge
from headrace.api.errors import handle
from headrace.api.exchange import Exchanges
from headrace.api.generate import IGNORED
from headrace.api.keys import Keys
from headrace.api.relay import Handler, resuming
from headrace.api.resume import HEADER
from headrace.api.seats import Seats
from headrace.api.service import Service
from headrace.errors import HeadraceError

BEGIN_STREAMS: dict[str, Handler] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/responses": responses.create,
    "/v1/messages": messages.create,
}
ROUTES = (
    *(Route(path, resuming(handler), methods=["POST"]) for path, handler in BEGIN_STREAMS.items()),
    Route("/v1/responses/{id}", responses.retrieve),
    Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
    Route("/v1/responses/{id}/input_items", responses.list_input),
    Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
    Route("/v1/streams/{id}", relay.follow),
    Route("/v1/streams/{id}", relay.end, methods=["DELETE"]),
    Route("/v1/embeddings", embeddings.embeddings, methods=["POST"]),
    Route("/classify", classify.classify, methods=["POST"]),
    Route("/score", score.score, methods=["POST"]),
    Route("/v1/models", models.list_models),
    Route("/v1/models/{model:path}", models.get_model),
    Route("/tokenize", tokenize.tokenize, methods=["POST"]),
    Route("/detokenize", tokenize.detokenize, methods=["POST"]),
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/metrics", health.metrics),
    Route("/version", health.version),
    Route("/openapi.json", openapi.openapi),
)


def create_app(service: Service, exchanges: Exchanges, seats: Seats | None = None) -> ASGIApp:
    """The ASGI app. Its lifespan starts and closes the engine's client and the sweep.

    seats: shared with the server's other HTTP processes; None: there are no others.
    """

    others = relay.Relay(service.streams, service.folder)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        await service.responses.start()
        await others.start()
        await service.records.start()
        await service.client.start()
        await service.client.first_pulse()
        sweep = asyncio.create_task(exchanges.sweep())
        try:
            yield
        finally:
            sweep.cancel()
            await asyncio.gather(sweep, return_exceptions=True)
            await service.client.close()
            await others.close()
            await service.records.close()
            await service.responses.close()

    routes = (*ROUTES, *page.ROUTES, *page_data.ROUTES) if service.settings.ui else ROUTES
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HeadraceError: handle, HTTPException: handle, Exception: handle},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    paths = [route.path for route in routes]
    settings = service.settings
    seats = seats or Seats(settings.max_streams)
    edge = Edge(
        app,
        paths,
        service.metrics,
        exchanges,
        Keys(settings.api_key, settings.admin_key),
        seats,
        settings.cors_origin,
        service.recorder,
        service.tracer,
        resumes=BEGIN_STREAMS if service.streams.enabled else (),
    )
    if not settings.cors_origin:
        return edge
    return CORSMiddleware(  # outside: a preflight has no key, and a refusal must be readable
        edge,
        allow_origins=settings.cors_origin,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", IGNORED, HEADER.decode()],
    )

"""GET /health (the engine process lives), /ready (it can take requests), /metrics, /version."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.api.service import encode_json, service_of
from headrace.errors import UsageLogFailed
from headrace.observe.exposition import CONTENT_TYPE


async def health(request: Request) -> Response:
    """200 while the engine's pulse is fresh, loading or not: restart the server when it is 503."""
    client = service_of(request).client
    content = encode_json({"status": client.state, "phase": client.phase})
    return Response(content, 200 if client.alive else 503, media_type="application/json")


async def ready(request: Request) -> Response:
    """200 when a request sent now would be taken: keep traffic away when it is 503."""
    service = service_of(request)
    state: str = "draining" if service.draining else service.client.state
    if state == "ready" and not service.meter.admits():
        state = UsageLogFailed.code
    content = encode_json({"status": state, "phase": service.client.phase})
    return Response(content, 200 if state == "ready" else 503, media_type="application/json")


async def metrics(request: Request) -> Response:
    """All processes of this server added up."""
    metrics = service_of(request).metrics
    metrics.flush()
    text = await asyncio.to_thread(metrics.expose)
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    """The version of headrace."""
    return Response(encode_json({"version": __version__}), media_type="application/json")

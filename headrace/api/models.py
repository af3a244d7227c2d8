"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.service import Service, encode_json, named, service_of


async def list_models(request: Request) -> Response:
    """The one model served here."""
    content = {"object": "list", "data": [await _card(service_of(request))]}
    return Response(encode_json(content), media_type="application/json")


async def get_model(request: Request) -> Response:
    """One model. Raises NotFound for another name."""
    service = service_of(request)
    service.check_model(named(request, "model"))
    return Response(encode_json(await _card(service)), media_type="application/json")


async def _card(service: Service) -> dict[str, Any]:
    info, settings = service.client.info, service.settings
    card = {
        "id": service.name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "headrace",
        "max_model_len": info.max_model_len if info else None,
        "kv_tokens": info.kv_tokens if info else None,
        "tokenizer": await asyncio.to_thread(lambda: service.prompt_identity),
    }
    if settings.stream_resume_s:
        card["stream_resume_s"] = settings.stream_resume_s
    if settings.kv_events_endpoint:  # for a gateway, which then listens by itself
        card["kv_events"] = {
            "endpoint": settings.kv_events_endpoint,
            "replay_endpoint": settings.kv_events_replay_endpoint,
            "topic": settings.kv_events_topic,
            "windows": info.kv_windows if info else [],
        }
    return card

"""GET /openapi.json: every route with its whole request body, from the structs that check it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace import __version__
from headrace.api.classify import Classify
from headrace.api.embeddings import Embeddings
from headrace.api.message_blocks import Countable, Messages
from headrace.api.response_items import Responses
from headrace.api.schemas import Chat, Completion, Detokenize, Tokenize
from headrace.api.score import Score
from headrace.api.service import encode_json, service_of
from headrace.text.turns import ROLES

# Path of a POST -> its body, and whether `stream` makes its answer a stream of events
BODIES: Mapping[str, tuple[type[msgspec.Struct], bool]] = {
    "/v1/chat/completions": (Chat, True),
    "/v1/completions": (Completion, True),
    "/v1/responses": (Responses, True),
    "/v1/messages": (Messages, True),
    "/v1/messages/count_tokens": (Countable, False),
    "/v1/embeddings": (Embeddings, False),
    "/classify": (Classify, False),
    "/score": (Score, False),
    "/tokenize": (Tokenize, False),
    "/detokenize": (Detokenize, False),
}
TEXTS = frozenset({"/metrics"})  # answered with text
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


async def openapi(request: Request) -> Response:
    """The document. Fields that this server knows and does not honour are not in it."""
    known = [route for route in request.app.routes if isinstance(route, Route)]
    routes = [route for route in known if route.include_in_schema]  # not those of the live page
    made = document(routes, service_of(request).name)
    return Response(encode_json(made), media_type="application/json")


def document(routes: Iterable[Route], model: str) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes of a server of `model`."""
    kinds = [kind for kind, _ in BODIES.values()]
    shapes, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    for component in components.values():
        fields = component.get("properties", {})
        if "model" in fields:  # null where it may be left out
            fields["model"] = {"enum": [model, None] if "default" in fields["model"] else [model]}
    components["Message"]["properties"]["role"]["enum"] = list(ROLES)
    bodies = dict(zip(kinds, shapes, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(path, route, method, bodies)
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    path: str, route: Route, method: str, bodies: Mapping[type[msgspec.Struct], Any]
) -> dict[str, Any]:
    kind, streams = BODIES.get(path, (None, False)) if method == "POST" else (None, False)
    answers: dict[str, Any] = {"text/plain" if path in TEXTS else "application/json": {}}
    if streams:
        answers["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    summary = (route.endpoint.__doc__ or "").partition("\n")[0]
    operation: dict[str, Any] = {
        "operationId": method.lower() + re.sub(r"\W+", "_", path).rstrip("_"),
        "summary": summary,
        "responses": {
            "200": {"description": "the answer", "content": answers},
            "default": {"description": "an error", "content": error},
        },
    }
    if path in ("/health", "/ready"):  # their 503 is an answer too
        operation["responses"]["default"]["content"] = {"application/json": {}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if kind is not None:
        content = {"application/json": {"schema": bodies[kind]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation

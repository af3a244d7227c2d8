"""POST /v1/embeddings: OpenAI's body and answer, with a `pooling` and a `normalize` beside."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.admission import let_in
from headrace.api.body import read_body
from headrace.api.pooled import Pooled, Vectors, input_ids, vectors
from headrace.api.schemas import parse
from headrace.api.service import Service, encode_json, service_of
from headrace.vectors import check_dimensions, embedding, pooling_of

INLINE_VECTORS = 16  # more are encoded in a thread: nobody else's stream waits


class Embeddings(Pooled, frozen=True, kw_only=True):
    """Body of /v1/embeddings. `input` takes four shapes, as `prompt` does."""

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None


async def embeddings(request: Request) -> Response:
    """Texts or ids to vectors. Raises the errors of body, schemas and admission."""
    service = service_of(request)
    raw, size_bytes = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Embeddings, raw, strict=service.settings.strict)
    info = let_in(service, body.model, body.priority)
    check_dimensions(info, body.dimensions)
    pooling = pooling_of(service.card, body.pooling)
    inputs = await input_ids(service, body, body.input, "input", size_bytes)
    found = await vectors(request, service, body, inputs, pooling)
    if len(found.raw) <= INLINE_VECTORS:
        content = _encoded(service, body, found)
    else:
        content = await asyncio.to_thread(_encoded, service, body, found)
    return Response(content, headers=found.headers(unknown), media_type="application/json")


def _encoded(service: Service, body: Embeddings, found: Vectors) -> bytes:
    data = [
        {"object": "embedding", "index": at, "embedding": _shown(body, raw)}
        for at, raw in enumerate(found.raw)
    ]
    return encode_json(
        {"object": "list", "data": data, "model": service.name, "usage": found.usage}
    )


def _shown(body: Embeddings, raw: bytes) -> str | list[float]:
    vector = embedding(raw, body.dimensions, normalize=body.normalize is not False)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    shown: list[float] = vector.tolist()
    return shown

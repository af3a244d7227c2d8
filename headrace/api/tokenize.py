"""POST /tokenize and /detokenize, with vLLM's bodies."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_body
from headrace.api.generate import ignored
from headrace.api.schemas import Detokenize, Tokenize, parse
from headrace.api.service import Service, encode_json, service_of
from headrace.api.turns import chat_ids
from headrace.errors import InvalidRequest


async def tokenize(request: Request) -> Response:
    """Text or messages to ids, as the other routes would see them."""
    service = service_of(request)
    raw, _ = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Tokenize, raw, strict=service.settings.strict)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    content = await asyncio.to_thread(_tokenized, service, body)
    return Response(content, headers=ignored(unknown), media_type="application/json")


def _tokenized(service: Service, body: Tokenize) -> bytes:
    tokenizer = service.tokenizer
    if body.prompt is not None:
        ids = tokenizer.encode(body.prompt, add_special=body.add_special_tokens is not False)
    else:
        ids = chat_ids(service, body)
    strings = None
    if body.return_token_strs:
        strings = [tokenizer.decode([token], skip_special=False) for token in ids]
    info = service.client.info
    return encode_json(
        {
            "count": len(ids),
            "max_model_len": info.max_model_len if info else None,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def detokenize(request: Request) -> Response:
    """Ids to text, special tokens included."""
    service = service_of(request)
    raw, _ = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Detokenize, raw, strict=service.settings.strict)
    service.check_model(body.model)
    content = await asyncio.to_thread(_detokenized, service, body)
    return Response(content, headers=ignored(unknown), media_type="application/json")


def _detokenized(service: Service, body: Detokenize) -> bytes:
    service.tokenizer.need_text("tokens")
    vocab_size = service.tokenizer.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"tokens: {token} is not in [0, {vocab_size})", param="tokens")
    return encode_json({"prompt": service.tokenizer.decode(body.tokens, skip_special=False)})

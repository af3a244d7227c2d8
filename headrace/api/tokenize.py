"""POST /tokenize and /detokenize, with vLLM's bodies."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_body
from headrace.api.generate import ignored
from headrace.api.prepare import chat_ids, normalise
from headrace.api.schemas import Detokenize, Tokenize, parse
from headrace.api.service import encode_json, service_of
from headrace.errors import InvalidRequest


async def tokenize(request: Request) -> Response:
    """Text or messages to ids, as the other routes would see them."""
    service = service_of(request)
    raw = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Tokenize, raw)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    tokenizer = service.tokenizer

    def work() -> list[int]:
        if body.prompt is not None:
            return tokenizer.encode(body.prompt, add_special=body.add_special_tokens is not False)
        return chat_ids(service, body, normalise(body.messages or []))

    ids = await asyncio.to_thread(work)
    strings = None
    if body.return_token_strs:
        strings = [tokenizer.decode([token], skip_special=False) for token in ids]
    info = service.client.info
    content = {
        "count": len(ids),
        "max_model_len": info.max_model_len if info else None,
        "tokens": ids,
        "token_strs": strings,
    }
    return Response(encode_json(content), headers=ignored(unknown), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Ids to text, special tokens included."""
    service = service_of(request)
    raw = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Detokenize, raw)
    service.check_model(body.model)
    vocab_size = service.tokenizer.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"tokens: {token} is not in [0, {vocab_size})", param="tokens")
    text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, skip_special=False)
    content = encode_json({"prompt": text})
    return Response(content, headers=ignored(unknown), media_type="application/json")

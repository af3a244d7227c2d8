"""What requests for vectors do alike: texts become ids, ids become vectors."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.exchange import exchange_of
from headrace.api.generate import ignored
from headrace.api.metering import NO_OUTPUT
from headrace.api.moderate import labelled, moderated
from headrace.api.prepare import split_prompt, timed
from headrace.api.schemas import MAX_SALT, MAX_USER, Int64
from headrace.api.service import Service, encode_json
from headrace.api.stream import watch_client
from headrace.engine.client import Job
from headrace.errors import InvalidRequest, ShuttingDown
from headrace.messages import Pooling
from headrace.vectors import check_lengths

MAX_INPUTS = 2048  # OpenAI's limit of /v1/embeddings


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """What the bodies share. None means: not given."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"metadata"})
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "truncate_prompt_tokens": (None,),
        "mm_processor_kwargs": (None, {}),
        "task": (None,),
    }

    model: str | None = None
    add_special_tokens: bool | None = None
    priority: Int64 | None = None
    user: Annotated[str, Meta(max_length=MAX_USER)] | None = None  # for the usage log
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None


class Inputs(msgspec.Struct, frozen=True):
    """What is to be computed, by prompt; and what moderation hooks say of it."""

    ids: list[list[int]]
    labels: dict[str, float] = {}


class Vectors(msgspec.Struct, frozen=True):
    """Of each prompt, as `messages.Vector.values`; and how many prompt tokens a cache held."""

    raw: list[bytes]
    prompt_tokens: int
    cached_tokens: int
    labels: dict[str, float]  # of moderation hooks that annotate

    def headers(self, unknown: list[str]) -> dict[str, str]:
        """Of the answer. unknown: fields that nobody knows."""
        return ignored(unknown) | labelled(self.labels)

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage; nothing is generated."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def input_ids(
    service: Service, body: Pooled, given: str | list[Any], field: str, size_bytes: int
) -> Inputs:
    """One text or many, or ids. Raises InvalidRequest naming `field`, and what hooks raise."""
    info = service.client.require()

    def split() -> list[str | list[int]]:
        return split_prompt(given, info.vocab_size, field, MAX_INPUTS)

    def encode() -> list[list[int]]:
        prompts = split()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if "" in texts:
            raise InvalidRequest(f"{field} holds an empty text", param=field)
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        service.tokenizer.need_text(field)
        return service.tokenizer.encode_batch(
            texts, add_special=body.add_special_tokens is not False, add_end=True
        )

    labels = await _moderated(service, split(), field) if service.hooks.moderation else {}
    ids = await timed(service, size_bytes, encode)
    check_lengths(info, ids, field)
    return Inputs(ids, labels)


async def _moderated(
    service: Service, prompts: list[str | list[int]], field: str
) -> dict[str, float]:
    """Hooks see texts; ids are read as text."""
    texts = []
    for prompt in prompts:
        if isinstance(prompt, list):
            service.tokenizer.need_text(field)
            prompt = service.tokenizer.decode(prompt, skip_special=False)
        texts.append(prompt)
    return await moderated(service, texts)


async def vectors(
    request: Request, service: Service, body: Pooled, inputs: Inputs, pooling: Pooling
) -> Vectors:
    """Run them, as many at once as there are rows: a batch of any size takes no more of the queue.

    Raises what the engine says of one of them, or ClientGone.
    """
    exchange = exchange_of(request)
    if service.draining:  # it may have begun while we tokenised
        raise ShuttingDown("the server is shutting down")
    raw: list[bytes] = []
    prompts = inputs.ids
    tokens, cached, first_s = sum(map(len, prompts)), 0, 0.0
    rows = service.client.require().max_num_seqs
    like = Job(
        [], 0, priority=body.priority or 0, cache_salt=body.cache_salt or "", pooling=pooling
    )
    bill = service.meter.open(exchange, body.user or "", [like], tokens)
    record = exchange.record
    if record is not None:
        record.tokenized()
        record.submitted(prompts, 1, bill)
    full = None if record is None else record.full
    with bill.covering(NO_OUTPUT):
        for begin in range(0, len(prompts), rows):
            some = prompts[begin : begin + rows]
            jobs = [msgspec.structs.replace(like, prompt=prompt) for prompt in some]
            watcher = None if begin else full
            stream = service.client.submit(jobs, exchange.arrived_s, bill, watcher)
            stream.first_token_s = first_s
            if record is not None:
                record.follow(stream)
            async with stream, watch_client(request.receive, stream):
                exchange.tokens = stream
                try:
                    raw += await stream.pooled()
                finally:
                    cached += stream.cached_tokens
                    exchange.detail = f" prompt={tokens} cached={cached} vectors={len(raw)}"
            first_s = stream.first_token_s
        await bill.close(NO_OUTPUT)
    return Vectors(raw, tokens, cached, inputs.labels)


def listed(
    service: Service, prefix: str, data: list[dict[str, Any]], found: Vectors, unknown: list[str]
) -> Response:
    """vLLM's answer of a route that OpenAI has not."""
    content = {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "model": service.name,
        "data": data,
        "usage": {**found.usage, "completion_tokens": 0},
    }
    return Response(
        encode_json(content), headers=found.headers(unknown), media_type="application/json"
    )

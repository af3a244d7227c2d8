"""POST /score: how well texts fit each other, as vLLM has it.

A model with a classification head of one label reads both texts at once, and says what that label
says. Of another model's texts it is the cosine of their embeddings.
"""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.admission import let_in
from headrace.api.body import read_body
from headrace.api.moderate import moderated
from headrace.api.pooled import MAX_INPUTS, Inputs, Pooled, Vectors, listed, vectors
from headrace.api.prepare import timed
from headrace.api.schemas import parse
from headrace.api.service import Service, service_of
from headrace.errors import InvalidRequest
from headrace.messages import EngineInfo
from headrace.vectors import check_lengths, embedding, floats, pooling_of, probabilities, similarity

Pairs = list[tuple[str, str]]


class Score(Pooled, frozen=True, kw_only=True):
    """Body of /score: one text_1 and one or many text_2, or as many of each.

    pooling is for models without a classification head, use_activation for those with one.
    """

    text_1: str | list[str]
    text_2: str | list[str]
    pooling: Literal["mean", "last"] | None = None
    use_activation: bool | None = None


async def score(request: Request) -> Response:
    """Pairs of texts to numbers. Raises the errors of body, schemas and admission."""
    service = service_of(request)
    raw, size_bytes = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Score, raw, strict=service.settings.strict)
    info = let_in(service, body.model, body.priority)
    service.tokenizer.need_text("text_1")
    _check(body, info)
    pairs = _pairs(body)
    how = _read_together if info.labels else _compared
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    labels = await moderated(service, texts) if service.hooks.moderation else {}
    scores, found = await how(request, service, body, pairs, labels, size_bytes)
    data = [{"index": at, "object": "score", "score": one} for at, one in enumerate(scores)]
    return listed(service, "score", data, found, unknown)


def _check(body: Score, info: EngineInfo) -> None:
    if info.labels > 1:
        raise InvalidRequest(
            f"this model has {info.labels} labels: /score needs one of a single label, ask "
            "/classify",
            param="model",
        )
    unused = ("pooling", body.pooling) if info.labels else ("use_activation", body.use_activation)
    if unused[1] is not None:
        which = "with" if info.labels else "without"
        raise InvalidRequest(
            f"{unused[0]} is not for a model {which} a classification head", param=unused[0]
        )


def _pairs(body: Score) -> Pairs:
    ones, others = (
        [texts] if isinstance(texts, str) else texts for texts in (body.text_1, body.text_2)
    )
    for field, texts in (("text_1", ones), ("text_2", others)):
        if not texts or "" in texts:
            raise InvalidRequest(f"{field} is empty or holds an empty text", param=field)
        if len(texts) > MAX_INPUTS:
            raise InvalidRequest(f"more than {MAX_INPUTS} texts in {field}", param=field)
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise InvalidRequest(
            f"{len(ones)} texts in text_1 and {len(others)} in text_2: one, or as many",
            param="text_1",
        )
    return list(zip(ones, others, strict=True))


async def _read_together(
    request: Request,
    service: Service,
    body: Score,
    pairs: Pairs,
    labels: dict[str, float],
    size_bytes: int,
) -> tuple[list[float], Vectors]:
    special = body.add_special_tokens is not False
    prompts = await timed(
        service, size_bytes, lambda: service.tokenizer.encode_pairs(pairs, add_special=special)
    )
    check_lengths(service.client.require(), prompts, "text_2")
    found = await vectors(request, service, body, Inputs(prompts, labels), "scores")
    scores = [floats(raw) for raw in found.raw]
    if body.use_activation is not False:
        scores = [probabilities(one, service.card.problem) for one in scores]
    return [float(one[0]) for one in scores], found


async def _compared(
    request: Request,
    service: Service,
    body: Score,
    pairs: Pairs,
    labels: dict[str, float],
    size_bytes: int,
) -> tuple[list[float], Vectors]:
    """Each text is computed once, however many pairs it is in."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    pooling = pooling_of(service.card, body.pooling)
    special = body.add_special_tokens is not False
    prompts = await timed(
        service,
        size_bytes,
        lambda: service.tokenizer.encode_batch(texts, add_special=special, add_end=True),
    )
    check_lengths(service.client.require(), prompts, "text_2")
    found = await vectors(request, service, body, Inputs(prompts, labels), pooling)
    units = {text: embedding(raw) for text, raw in zip(texts, found.raw, strict=True)}
    return [similarity(units[one], units[other]) for one, other in pairs], found

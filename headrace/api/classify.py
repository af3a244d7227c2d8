"""POST /classify: texts or a conversation to the probabilities of the labels, as vLLM has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.admission import let_in
from headrace.api.body import read_body
from headrace.api.moderate import moderated, texts_of
from headrace.api.pooled import Inputs, Pooled, input_ids, listed, vectors
from headrace.api.prepare import INLINE_BYTES, timed
from headrace.api.schemas import Tokenize, parse
from headrace.api.service import Service, service_of
from headrace.api.turns import chat_text
from headrace.errors import InvalidRequest
from headrace.sources.card import ModelCard
from headrace.text.turns import Message
from headrace.vectors import check_labels, check_lengths, floats, probabilities

if TYPE_CHECKING:
    from headrace.vectors import Floats


class Classify(Pooled, frozen=True, kw_only=True):
    """Body of /classify: `input` takes four shapes, as `prompt` does; or `messages`.

    use_activation: false asks for the scores as they are. A conversation ends where it ends: no
    answer is begun unless add_generation_prompt says so.
    """

    input: str | list[Any] | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    use_activation: bool | None = None


async def classify(request: Request) -> Response:
    """Texts to labels. Raises the errors of body, schemas and admission."""
    service = service_of(request)
    raw, size_bytes = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Classify, raw, strict=service.settings.strict)
    check_labels(let_in(service, body.model, body.priority))
    inputs = await _inputs(service, body, size_bytes)
    found = await vectors(request, service, body, inputs, "scores")
    data = [
        {"index": at, **_labelled(service.card, floats(scores), raw=body.use_activation is False)}
        for at, scores in enumerate(found.raw)
    ]
    return listed(service, "classify", data, found, unknown)


async def _inputs(service: Service, body: Classify, size_bytes: int) -> Inputs:
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("send either input or messages", param="input")
    if body.input is not None:
        return await input_ids(service, body, body.input, "input", size_bytes)
    shape = Tokenize(
        messages=body.messages,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=bool(body.add_generation_prompt),
    )
    labels = await moderated(service, texts_of(shape)) if service.hooks.moderation else {}

    def render() -> list[int]:
        text = chat_text(service, shape, [])
        return service.tokenizer.encode(text, add_special=bool(body.add_special_tokens))

    ids = await timed(service, INLINE_BYTES + 1, render)  # a template may take its time
    check_lengths(service.client.require(), [ids], "messages")
    return Inputs([ids], labels)


def _labelled(card: ModelCard, scores: Floats, *, raw: bool) -> dict[str, Any]:
    probs = scores if raw else probabilities(scores, card.problem)
    return {
        "label": card.labels[int(scores.argmax())],
        "probs": probs.tolist(),
        "num_classes": len(probs),
    }

"""What a body asks of the form of its answer: one grammar, checked before anything is computed."""

from __future__ import annotations

import asyncio

from headrace.api.schemas import Generation
from headrace.api.service import Service
from headrace.errors import InvalidRequest
from headrace.grammar.asked import StructuredOutputs, of_response_format, of_structured
from headrace.messages import Grammar


async def checked_grammar(service: Service, request: Generation) -> Grammar | None:
    """None if nothing is asked. Raises InvalidRequest naming the field and, where there is one, the
    keyword; QueueFull."""
    found = asked_grammar(request)
    if found is None:
        return None
    param, grammar = found
    most, size = service.settings.max_schema_bytes, len(grammar.text.encode())
    if size > most:
        raise InvalidRequest(f"{param} has {size} bytes; {most} is the most", param=param)
    service.tokenizer.need_text(param)
    await asyncio.wrap_future(service.checker.submit(grammar, param))
    return grammar


def asked_grammar(request: Generation) -> tuple[str, Grammar] | None:
    """The field that asks, and its grammar. Raises InvalidRequest, for more than one too."""
    asked: dict[str, Grammar | None] = {}
    if request.response_format is not None:
        asked["response_format"] = of_response_format(request.response_format)
    if request.structured_outputs is not None:
        asked["structured_outputs"] = of_structured(request.structured_outputs)
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{name}")
        if value is not None:
            asked[f"guided_{name}"] = of_structured(
                StructuredOutputs(**{name: value}), f"guided_{name}"
            )
    given = [(param, grammar) for param, grammar in asked.items() if grammar is not None]
    if len(given) > 1:
        names = " and ".join(param for param, _ in given)
        raise InvalidRequest(f"{names} exclude each other", param=given[-1][0])
    return given[0] if given else None

"""What a body asks of the form of its answer: one grammar, checked before anything is computed."""

from __future__ import annotations

import asyncio

import msgspec

from headrace.api.schemas import Generation
from headrace.api.service import Service
from headrace.api.tools import Toolbox
from headrace.errors import InvalidRequest
from headrace.grammar.asked import (
    StructuredOutputs,
    json_grammar,
    of_response_format,
    of_structured,
)
from headrace.grammar.calls import loosened
from headrace.messages import Grammar


async def checked_grammar(service: Service, request: Generation) -> Grammar | None:
    """None if nothing is asked. Raises InvalidRequest naming the field and, where there is one, the
    keyword; QueueFull."""
    found = asked_grammar(request)
    if found is None:
        return None
    return await _checked(service, *found)


async def checked_chat_grammar(
    service: Service, request: Generation, tools: Toolbox | None, inside: bool
) -> Grammar | None:
    """As `checked_grammar`, of a chat: JSON comes behind the reasoning, if the model thinks, and
    beside or instead of tool calls. Other forms rule the whole output, as it is written.

    inside: the answer begins inside of reasoning.
    """
    found, dialect = asked_grammar(request), service.dialect
    if tools is None:
        if found is None:
            return None
        param, grammar = found
        return await _checked(service, param, dialect.after_thinking(inside, grammar))
    if found is not None and tools.must:
        if found[0] != "response_format":
            raise InvalidRequest(
                f"{found[0]} and a tool_choice that leaves only calls exclude each other",
                param=found[0],
            )
        found = None  # OpenAI: it says how a text looks, and there is none
    if found is not None and found[1].kind != "json":
        return await _checked(service, *found)
    text = found[1] if found is not None else None
    made = dialect.grammar(tools, inside, text)
    if made is None:
        return None
    try:
        return await _checked(service, "tools", made)
    except InvalidRequest:
        eased = await _eased(service, tools)
        if eased is tools:
            raise
        made = dialect.grammar(eased, inside, text)
        assert made is not None, "a grammar was needed before"
        return await _checked(service, "tools", made)


async def _eased(service: Service, tools: Toolbox) -> Toolbox:
    """Of tools that do not compile: those that are not strict with schemas that do.

    Raises InvalidRequest naming the schema of a strict one that does not.
    """
    offers = []
    for offer in tools.offers:
        try:
            schema = json_grammar(offer.parameters, offer.param, strict=offer.strict)
            await _checked(service, offer.param, schema)
        except InvalidRequest:
            if offer.strict:
                raise
            offers.append(msgspec.structs.replace(offer, parameters=loosened(offer.parameters)))
        else:
            offers.append(offer)
    return tools if offers == tools.offers else msgspec.structs.replace(tools, offers=offers)


async def _checked(service: Service, param: str, grammar: Grammar) -> Grammar:
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

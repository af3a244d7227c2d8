"""Prompts that come with their tokens, from a gateway that has made them."""

from __future__ import annotations

import asyncio

from headrace.api.record import Record
from headrace.api.schemas import Chat, Completion
from headrace.api.service import Service
from headrace.errors import InvalidRequest

FIELD = "prompt_ids"
_TAIL = 64  # tokens in which the opening of a reasoning at a prompt's end must lie


async def given_ids(
    service: Service, request: Chat | Completion, vocab_size: int, record: Record | None
) -> list[int]:
    """The tokens that came with the request, if they are those that would be made here; else [].

    Only the same tokenizer and template make the same tokens. Hooks that judge a text must see
    what the model reads, and a full record shows how it came about: then nothing is taken over.
    Raises InvalidRequest where the tokens cannot belong to the body.
    """
    given = request.prompt_ids
    if given is None:
        return []
    _check(request)
    identity = await asyncio.to_thread(lambda: service.prompt_identity)
    if service.hooks.moderation or service.hooks.score:
        outcome = "hooks"
    elif record is not None and record.full is not None:
        outcome = "recorded"
    elif not identity or given.tokenizer != identity:
        outcome = "other_tokenizer"
    else:
        outcome = "taken"
    service.metrics.count_given_prompt(outcome)
    if outcome != "taken":
        return []
    if max(given.ids) >= vocab_size:
        raise InvalidRequest(
            f"{FIELD}: {max(given.ids)} is not a token id in [0, {vocab_size})", param=FIELD
        )
    return given.ids


def _check(request: Chat | Completion) -> None:
    if isinstance(request, Completion):
        if not isinstance(request.prompt, str):
            raise InvalidRequest(f"{FIELD} is for a prompt that is one text", param=FIELD)
    elif request.chat_template is not None:
        raise InvalidRequest(f"{FIELD} and chat_template exclude each other", param=FIELD)


def end_of(service: Service, ids: list[int]) -> str:
    """The text at the end of a prompt, special tokens included."""
    return service.tokenizer.decode(ids[-_TAIL:], skip_special=False)

"""Refuse what can never run, or not now, before anything is computed for it."""

from __future__ import annotations

from headrace.api.schemas import MAX_N, Generation
from headrace.api.service import Service
from headrace.errors import ContextTooLong, InvalidRequest, ShuttingDown
from headrace.messages import EngineInfo


def admit(service: Service, request: Generation) -> EngineInfo:
    """Checks that need no tokens. Returns the engine's facts.

    Raises ShuttingDown, EngineDead, NotReady, NotFound or InvalidRequest.
    """
    if service.draining:
        raise ShuttingDown("the server is shutting down")
    service.check_model(request.model)
    info = service.client.require()
    most = min(MAX_N, info.max_num_seqs)
    if (request.n or 1) > most:
        raise InvalidRequest(f"n = {request.n} is over {most}", param="n")
    if request.priority and service.settings.scheduling_policy != "priority":
        raise InvalidRequest(
            "priority other than 0 needs a server with --scheduling-policy priority",
            param="priority",
        )
    for token in request.stop_token_ids or ():
        if not 0 <= token < info.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token} is not in [0, {info.vocab_size})", param="stop_token_ids"
            )
    return info


def output_limit(info: EngineInfo, prompt_tokens: int, asked: int | None, param: str) -> int:
    """max_tokens of one prompt: what was asked, or the rest of the context.

    Raises ContextTooLong with both numbers when they do not fit.
    """
    room = info.max_model_len - prompt_tokens
    if room < 1 or (asked or 1) > room:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and {asked or 1} more are asked for, but this "
            f"server holds {info.max_model_len} tokens in all",
            param=param,
        )
    return asked or room

"""Refuse what can never run, or not now, before anything is computed for it."""

from __future__ import annotations

from headrace.api.schemas import Generation
from headrace.api.service import Service
from headrace.errors import InvalidRequest, ShuttingDown
from headrace.messages import EngineInfo
from headrace.vectors import check_generates


def admit(service: Service, request: Generation) -> EngineInfo:
    """Checks that need no tokens. Returns the engine's facts.

    Raises ShuttingDown, EngineDead, NotReady, NotFound or InvalidRequest.
    """
    info = let_in(service, request.model, request.priority)
    check_generates(info)
    most = min(service.settings.max_n, info.max_num_seqs)
    if (request.n or 1) > most:
        raise InvalidRequest(f"n = {request.n} is over {most}", param="n")
    if request.width > most:
        param = "beam_width" if request.use_beam_search else "best_of"
        raise InvalidRequest(f"{param} = {request.width} is over {most}", param=param)
    if service.hooks.filter and (request.top_count >= 0 or request.return_token_ids):
        param = "return_token_ids" if request.return_token_ids else "logprobs"
        raise InvalidRequest(
            f"{param}: a filter changes what this server sends, and tokens would show it",
            param=param,
        )
    for token in request.stop_token_ids or ():
        if not 0 <= token < info.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token} is not in [0, {info.vocab_size})", param="stop_token_ids"
            )
    return info


def let_in(service: Service, model: str | None, priority: int | None) -> EngineInfo:
    """What every request must pass. Returns the engine's facts. Raises as `admit`."""
    if service.draining:
        raise ShuttingDown("the server is shutting down")
    service.check_model(model)
    info = service.client.require()
    if priority and service.settings.scheduling_policy != "priority":
        raise InvalidRequest(
            "priority other than 0 needs a server with --scheduling-policy priority",
            param="priority",
        )
    return info

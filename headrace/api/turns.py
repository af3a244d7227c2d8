"""Messages to the text of a prompt, whatever the model's template lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.api.schemas import Chat, Tokenize
from headrace.api.service import Service
from headrace.api.tools import toolbox
from headrace.errors import InvalidRequest
from headrace.text.conversation import Asked
from headrace.text.turns import asked_by

_OWN = frozenset(["reasoning_effort"])  # what a template of the request is taken to read


def chat_text(service: Service, request: Chat | Tokenize, tools: Sequence[dict[str, Any]]) -> str:
    """The prompt of a conversation; it holds the template's own BOS. tools: those that are shown.

    Raises InvalidRequest.
    """
    return rendered(service, request, conversation_of(service, request, tools))


def conversation_of(
    service: Service, request: Chat | Tokenize, tools: Sequence[dict[str, Any]]
) -> Asked:
    """What is asked of a template. Raises InvalidRequest."""
    own = request.chat_template is not None
    return asked_by(request, tools, _OWN if own else service.template.facts.names)


def rendered(service: Service, request: Chat | Tokenize, conversation: Asked) -> str:
    """The conversation as the template writes it. Raises InvalidRequest."""
    if request.chat_template is None:
        return service.template.prompt(conversation, service.dialect.native)
    if not service.settings.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template needs a server started with --trust-request-chat-template",
            param="chat_template",
            code="unsupported_parameter",
        )
    return service.strangers.prompt(request.chat_template, conversation)


def chat_ids(service: Service, request: Chat | Tokenize) -> list[int]:
    """The prompt's tokens, tools included. Raises InvalidRequest."""
    choice = request.tool_choice if isinstance(request, Chat) else None
    tools = toolbox(request.tools, choice, None)
    text = chat_text(service, request, tools.shown if tools is not None else [])
    return service.tokenizer.encode(text, add_special=bool(request.add_special_tokens))

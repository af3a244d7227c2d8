"""Bodies of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from headrace.api.schemas import (
    MAX_LOGPROBS,
    MAX_SALT,
    MAX_STOP_IDS,
    MAX_USER,
    Count,
    Int64,
    PromptIds,
)
from headrace.draws import Draws
from headrace.errors import InvalidRequest
from headrace.grammar.asked import StructuredOutputs
from headrace.text.response_prompt import Input, ReasoningConfig, prompt_fields

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # reasoning comes back as it is: nothing to encrypt
MAX_INCLUDES = 16

Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=64)],
        Annotated[str, Meta(max_length=512)],
    ],
    Meta(max_length=16),
]


class TextFormat(msgspec.Struct, frozen=True):
    """text.format: response_format with its members side by side."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Stream(msgspec.Struct, frozen=True):
    """stream_options: only what asks for padding, and we never pad."""

    include_obfuscation: bool | None = None


class Responses(Draws, frozen=True, kw_only=True):
    """Body of /v1/responses."""

    HARMLESS: ClassVar = frozenset({
        "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options",
        "max_tool_calls",  # of tools that a server runs; ours runs none
    })  # fmt: skip
    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (None,),
        "background": (None, False),
        "background_options": (None,),
        "context_management": (None, []),
        "conversation": (None,),
        "image": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "truncation": (None, "disabled"),
    }

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: Stream | None = None
    max_output_tokens: Count | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDES)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    user: Annotated[str, Meta(max_length=MAX_USER)] | None = None  # for the usage log
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_ids: PromptIds | None = None  # as a gateway sends them

    @property
    def logprobs(self) -> bool:
        """Log-probabilities of the answer's text are asked for."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


# Chat's name of a field -> the one of responses.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}


def chat_fields(body: Responses, items: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a chat request needs, by chat's names; `items`: the conversation, oldest first.

    Raises InvalidRequest.
    """
    for name in body.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            raise InvalidRequest(
                f"include: {name!r} is nothing that is known here", param="include"
            )
    text = body.text or TextConfig()
    return {
        **prompt_fields(body, items),
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format(text.format),
        "verbosity": None if text.verbosity == "medium" else text.verbosity,
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": True if body.logprobs else None,
        "top_logprobs": body.top_logprobs or None,
        "user": body.user,
    }


def _format(asked: TextFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type != "json_schema":
        return None if asked is None else {"type": asked.type}
    schema = {
        name: getattr(asked, name)
        for name in ("name", "schema", "description", "strict")
        if getattr(asked, name) is not None
    }
    return {"type": "json_schema", "json_schema": schema}

"""Bodies of /v1/messages, and what a model says as Anthropic's content blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from headrace.api.schemas import (
    MAX_SALT,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_USER,
    Count,
    Int64,
    PromptIds,
)
from headrace.draws import Draws
from headrace.grammar.asked import StructuredOutputs
from headrace.text.message_prompt import (
    Blocks,
    OutputConfig,
    Thinking,
    ToolChoice,
    Turn,
    prompt_fields,
)
from headrace.text.parts import Arguments, Call, Part, Reasoning, Text


class Metadata(msgspec.Struct, frozen=True):
    """Who asks, by the caller's own name; for the usage log."""

    user_id: Annotated[str, Meta(max_length=MAX_USER)] | None = None


class Countable(Draws, frozen=True, kw_only=True):
    """Body of /v1/messages/count_tokens: what makes the prompt. How to draw changes no count."""

    HARMLESS: ClassVar = frozenset({
        "cache_control", "metadata", "service_tier", "user_profile_id", "workspace_id",
    })  # fmt: skip
    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (None,),
        "mcp_servers": (None, []),
        "context_management": (None,),
        "diagnostics": (None,),
        "inference_geo": (None,),
        "speed": (None, "standard"),
    }

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Messages(Countable, frozen=True, kw_only=True):
    """Body of /v1/messages: Anthropic's fields, and ours that draw and place a request."""

    max_tokens: Count
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]],
            Meta(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    metadata: Metadata | None = None
    stream: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_ids: PromptIds | None = None  # as a gateway sends them


# Chat's name of a field -> Anthropic's.
NAMES = {"stop": "stop_sequences", "response_format": "output_config"}


def chat_fields(body: Countable) -> dict[str, Any]:
    """What a chat request needs of it, by chat's names. Raises InvalidRequest."""
    choice, config = body.tool_choice, body.output_config or OutputConfig()
    form = config.format and {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": config.format.schema},
    }
    return {
        **prompt_fields(body),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "response_format": form,
    }


def blocks_of(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """The content of an answer, from its `joined` parts."""
    out: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Arguments):
            out[-1] |= _input(part.text)
        else:
            out.append(begun(part) | _filled(part))
    return out


def begun(part: Part) -> dict[str, Any]:
    """The block that a part begins, with nothing in it yet."""
    if isinstance(part, Text):
        return {"type": "text", "text": ""}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    assert isinstance(part, Call), "arguments begin no block"
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}


def _filled(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"text": part.text}
    return {"thinking": part.text} if isinstance(part, Reasoning) else {}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; those that were cut short beside it, as they are."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        value = None
    return {"input": value} if isinstance(value, dict) else {"partial_json": arguments}

"""The bodies that clients send: strict types, their ranges, and the fields refused or ignored.

A field is in one of four classes. Honoured: it is in a Struct here. Harmless: in ACCEPTED, it asks
for nothing that changes an answer. Not supported yet: in NOT_YET, a 400 unless its value is one
that asks for nothing. Unknown: accepted and named in a response header and the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from headrace.draws import Draws
from headrace.errors import InvalidRequest
from headrace.grammar.asked import ResponseFormat, StructuredOutputs

MAX_N = 128  # choices a prompt
MAX_PROMPTS = 1024  # prompts in one completions request
MAX_CHOICES = 2048  # prompts * n
MAX_STOPS = 16  # OpenAI allows 4
MAX_STOP_CHARS = 1000  # of each; the time to prepare one grows with it
MAX_STOP_IDS = 128
MAX_SALT = 256  # characters

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's, and vLLM's `continuous_usage_stats`: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # asks for padding: we never pad


class Generation(Draws, frozen=True, kw_only=True):
    """What chat and completions share, beside the fields of `Draws`. None means: not given."""

    model: str | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Count | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None  # these are structured_outputs, of old
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def limit_tokens(self) -> int | None:
        """Most tokens of one choice; None = not given."""
        return self.max_tokens


class Message(msgspec.Struct, frozen=True):
    """One turn. Content parts are checked and joined in `prepare`."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Chat(Generation, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def limit_tokens(self) -> int | None:
        """Most tokens of one choice; raises InvalidRequest when the two names disagree."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest(
                f"max_tokens = {old} and max_completion_tokens = {new} disagree: send one",
                param="max_completion_tokens",
            )
        return old if new is None else new


class Completion(Generation, frozen=True, kw_only=True):
    """Body of /v1/completions. `prompt` takes four shapes, told apart in `prepare`."""

    prompt: str | list[Any]
    echo: bool | None = None


class Tokenize(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /detokenize. Special tokens are part of the text."""

    model: str | None = None
    tokens: list[int]


ACCEPTED = frozenset({
    "user", "metadata", "service_tier", "store", "parallel_tool_calls", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention",
})  # fmt: skip

# Field -> values that ask for nothing. Anything else is a 400.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "truncate_prompt_tokens": (None,),
    "documents": (None, []),
    "chat_template": (None,),
    "prompt_embeds": (None,),
    "return_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
}


def parse(kind: type[T], body: Mapping[str, Any]) -> tuple[T, list[str]]:
    """Check a decoded body; returns the request and the names of fields nobody knows.

    Raises InvalidRequest whose `param` is the field, for a wrong type, range or combination and
    for a field that cannot be honoured yet.
    """
    known = kind.__struct_fields__
    unknown = []
    for field, value in body.items():
        if field in known or field in ACCEPTED:
            continue
        if field not in NOT_YET:
            unknown.append(field)
        elif not any(_same(value, harmless) for harmless in NOT_YET[field]):
            raise InvalidRequest(
                f"{field} is not supported yet", param=field, code="unsupported_parameter"
            )
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _named(error) from None
    if isinstance(request, Generation):
        unknown += _check(request, body)
    return request, unknown


def _check(request: Generation, body: Mapping[str, Any]) -> list[str]:
    """Rules between fields; returns unknown names inside stream_options."""
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise InvalidRequest("best_of other than n is not supported yet", param="best_of")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if "" in stops:
        raise InvalidRequest("stop holds an empty string", param="stop")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(f"a stop string is over {MAX_STOP_CHARS} characters", param="stop")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream = true", param="stream_options")
    options = body.get("stream_options") or {}
    return [f"stream_options.{name}" for name in options if not hasattr(StreamOptions, name)]


def _same(value: Any, harmless: Any) -> bool:
    return bool(value == harmless) and isinstance(value, bool) == isinstance(harmless, bool)


def _named(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec writes `Expected ... - at `$.field[0]`` or `... missing required field `x``."""
    text, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if not path and "required field `" in text:
        path = text.split("required field `", 1)[1].split("`", 1)[0]
        return InvalidRequest(f"{path} is required", param=path)
    return InvalidRequest(f"{path}: {text}" if path else text, param=path or None)

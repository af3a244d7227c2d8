"""The bodies that clients send: strict types, their ranges, and the fields refused or ignored.

A field is in one of four classes. Honoured: it is in a Struct here. Harmless: in ACCEPTED, it asks
for nothing that changes an answer. Not supported yet: in NOT_YET, a 400 unless its value is one
that asks for nothing. Unknown: accepted and named in a response header and the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.draws import Draws
from headrace.errors import InvalidRequest
from headrace.grammar.asked import Choices, Lark, Regex, ResponseFormat, StructuredOutputs
from headrace.text.tool_list import Tools
from headrace.text.turns import Message

MAX_N = 128  # choices a prompt
MAX_PROMPTS = 1024  # prompts in one completions request
MAX_CHOICES = 2048  # prompts * n
MAX_STOPS = 16  # OpenAI allows 4
MAX_STOP_CHARS = 1000  # of each; the time to prepare one grows with it
MAX_STOP_IDS = 128
MAX_RULES = 2**23  # ids of rules, times prompts: each prompt has its own copy
MAX_SALT = 256  # characters
MAX_USER = 512  # characters
MAX_LOGPROBS = 20  # OpenAI's limit of top_logprobs
MAX_BEAMS = MAX_LOGPROBS // 2  # a step looks at twice as many continuations
MAX_NAMES, MAX_NAME = 32, 64  # unknown fields that a refusal names, and characters of each
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's limit of /v1/completions

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Template = Annotated[str, Meta(min_length=1, max_length=256 * 1024)]
Documents = Annotated[list[dict[str, Any]], Meta(max_length=1024)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's, and vLLM's `continuous_usage_stats`: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # asks for padding: we never pad


class PromptIds(msgspec.Struct, frozen=True):
    """The prompt's tokens, made elsewhere from the same body: see `text.identity`."""

    tokenizer: Annotated[str, Meta(max_length=128)]
    ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(min_length=1)]


class Generation(Draws, frozen=True, kw_only=True):
    """What chat and completions share, beside the fields of `Draws`. None means: not given."""

    model: str | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    user: Annotated[str, Meta(max_length=MAX_USER)] | None = None  # for the usage log
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None  # these are structured_outputs, of old
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Lark | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    prompt_ids: PromptIds | None = None  # as a gateway sends them
    use_beam_search: bool | None = None
    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAMS)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None

    @property
    def width(self) -> int:
        """Choices (or beams) of each prompt in the engine; the n best of them are shown."""
        beams = self.beam_width if self.use_beam_search else None
        return beams or max(self.n or 1, self.best_of or 1)

    @property
    def top_count(self) -> int:
        """How many of the most likely tokens to report beside each; -1 = report nothing."""
        raise NotImplementedError

    @property
    def limit_tokens(self) -> int | None:
        """Most tokens of one choice; None = not given."""
        return self.max_tokens


class Chat(Generation, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Documents | None = None
    chat_template: Template | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def top_count(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

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
    # 0: nothing is generated, the prompt is echoed or reported on
    max_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | bool | None = None
    top_logprobs: int | None = None  # a field of chat: only 0 is taken

    @property
    def top_count(self) -> int:
        return -1 if self.logprobs is None or isinstance(self.logprobs, bool) else self.logprobs


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
    documents: Documents | None = None
    chat_template: Template | None = None
    tools: Tools | None = None

    @property
    def reasoning_effort(self) -> None:
        """Not asked for here."""


class Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /detokenize. Special tokens are part of the text."""

    model: str | None = None
    tokens: list[int]


ACCEPTED = frozenset({
    "metadata", "service_tier", "store", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    # Tokens carry their own spaces, as in all tokenizers of this kind: neither value adds any.
    "spaces_between_special_tokens",
})  # fmt: skip

# Field -> values that ask for nothing. Anything else is a 400.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "verbosity": (None,),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "moderation": (None,),
}

# Fields of chat that completions cannot honour.
CHAT_ONLY: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "documents": (None, []),
    "parallel_tool_calls": (None, True, False),
    "chat_template": (None,),
    "reasoning_effort": (None,),
}


def parse(kind: type[T], body: Mapping[str, Any], *, strict: bool = False) -> tuple[T, list[str]]:
    """Check a decoded body; returns the request and the names of fields nobody knows.

    A `kind` of another protocol has a HARMLESS and a REFUSED of its own.

    Raises InvalidRequest whose `param` is the field, for a wrong type, range or combination, for a
    field that cannot be honoured yet, and if `strict` for fields nobody knows.
    """
    known = kind.__struct_fields__
    accepted = getattr(kind, "HARMLESS", ACCEPTED)
    refused = {**NOT_YET, **CHAT_ONLY} if kind is Completion else getattr(kind, "REFUSED", NOT_YET)
    unknown = []
    for field, value in body.items():
        if field in known or field in accepted:
            continue
        if field not in refused:
            unknown.append(field)
        elif not any(_same(value, harmless) for harmless in refused[field]):
            why = "is a field of chat" if field in CHAT_ONLY else "is not supported yet"
            raise InvalidRequest(f"{field} {why}", param=field, code="unsupported_parameter")
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _named(error) from None
    for field, value in body.items():
        if field in known and field != "messages":
            unknown += _unknown_within(getattr(request, field), value, field)
    if isinstance(request, Generation):
        _check(request)
    if strict and unknown:
        shown = ", ".join(name[:MAX_NAME] for name in unknown[:MAX_NAMES])
        rest = f" and {len(unknown) - MAX_NAMES} more" if len(unknown) > MAX_NAMES else ""
        raise InvalidRequest(
            f"unknown: {shown}{rest} (this server is strict)", param=unknown[0][:MAX_NAME]
        )
    return request, unknown


def _unknown_within(value: Any, given: Any, name: str) -> Iterator[str]:
    """Members that nobody knows of a field made of `given`; where they are free, all are known."""
    if not isinstance(value, msgspec.Struct) or not isinstance(given, Mapping):
        return
    members = dict(zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True))
    for member, inner in given.items():
        if member not in members:
            yield f"{name}.{member}"
        else:
            yield from _unknown_within(getattr(value, members[member]), inner, f"{name}.{member}")


def _check(request: Generation) -> None:
    """Rules between fields."""
    _check_choices(request)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if "" in stops:
        raise InvalidRequest("stop holds an empty string", param="stop")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(f"a stop string is over {MAX_STOP_CHARS} characters", param="stop")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream = true", param="stream_options")


def _check_choices(request: Generation) -> None:
    """How many choices, and what is said of their tokens."""
    n, best_of = request.n or 1, request.best_of
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of = {best_of} is under n = {n}", param="best_of")
    if request.stream and request.width > n and not request.use_beam_search:
        raise InvalidRequest(
            "best_of over n cannot be streamed: the best is known at the end", param="best_of"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if isinstance(request, Chat):
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs = true", param="top_logprobs")
    elif isinstance(request, Completion):
        _check_completion(request)
    _check_beams(request)


def _check_completion(request: Completion) -> None:
    """What /v1/completions says of tokens, and when it generates none."""
    most = MAX_COMPLETION_LOGPROBS
    if request.logprobs is True:
        raise InvalidRequest(f"logprobs is a number from 0 to {most} here", param="logprobs")
    if request.top_logprobs:
        raise InvalidRequest(
            f"top_logprobs is a field of chat: send logprobs = 0 to {most}", param="top_logprobs"
        )
    if request.max_tokens != 0:
        return
    if not request.echo and request.prompt_logprobs is None:
        raise InvalidRequest(
            "max_tokens = 0 needs echo or prompt_logprobs: nothing else is answered",
            param="max_tokens",
        )
    if request.use_beam_search or request.width > (request.n or 1):
        raise InvalidRequest("max_tokens = 0 leaves nothing to choose from", param="max_tokens")


def _check_beams(request: Generation) -> None:
    """Fields that beams do not know, and beams' own fields without them."""
    if not request.use_beam_search:
        for name, nothing in (
            ("beam_width", None),
            ("length_penalty", 1),
            ("early_stopping", False),
        ):
            value = getattr(request, name)
            if value is not None and not _same(value, nothing):
                raise InvalidRequest(f"{name} needs use_beam_search = true", param=name)
        return
    width = request.width
    if not (request.n or 1) <= width <= MAX_BEAMS:
        raise InvalidRequest(
            f"{width} beams: n = {request.n or 1} to {MAX_BEAMS} are possible", param="beam_width"
        )
    if request.beam_width and request.best_of and request.beam_width != request.best_of:
        raise InvalidRequest("best_of and beam_width disagree: send one", param="best_of")
    neutral: dict[str, tuple[Any, ...]] = {
        "temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "stop": ([],),
        "repetition_penalty": (1,), "frequency_penalty": (0,), "presence_penalty": (0,),
        "typical_p": (1,), "top_n_sigma": (0,), "min_tokens": (0,), "dry_multiplier": (0,),
        "lz_penalty": (0,), "logit_bias": ({},), "allowed_token_ids": ([],),
        "banned_token_ids": ([],), "bad_words": ([],), "response_format": ({"type": "text"},),
        "structured_outputs": (), "stream": (False,),
    }  # fmt: skip
    for name, harmless in neutral.items():
        value = getattr(request, name, None)
        if value is not None and not any(_same(value, one) for one in harmless):
            raise InvalidRequest(f"beams are searched without {name}", param=name)


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

"""What a caller asks of the form of an answer, and the `Grammar` that it comes to.

The HTTP edge and `headrace.LLM` share it. `response_format` is OpenAI's, `structured_outputs` is
vLLM's, and so are the older guided_* fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.draws import check_types
from headrace.errors import InvalidRequest
from headrace.grammar.formats import tightened
from headrace.grammar.limits import MAX_CHOICES, MAX_TEXT, WHITESPACE
from headrace.grammar.schema import check_schema
from headrace.messages import Grammar

_LARK = msgspec.json.Encoder()


Regex = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]
Lark = Annotated[str, Meta(min_length=1)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the first five. None: not given.

    Raises InvalidRequest naming the field for a value of the wrong type or out of range.
    """

    json: str | dict[str, Any] | bool | None = None  # a JSON schema, or its text
    regex: Regex | None = None  # the whole output matches
    choice: Choices | None = None
    grammar: Lark | None = None
    json_object: bool | None = None  # any JSON object
    disable_any_whitespace: bool | None = None  # json: no blanks between tokens

    def __post_init__(self) -> None:
        check_types(self)

    def asks(self) -> list[str]:
        """The names of the constraints that are given."""
        names = ("json", "regex", "choice", "grammar", "json_object")
        return [n for n in names if getattr(self, n) is not None and getattr(self, n) is not False]


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """response_format.json_schema."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchema | None = None


def of_structured(asked: StructuredOutputs, param: str = "structured_outputs") -> Grammar | None:
    """The grammar, or None if nothing is asked. Raises InvalidRequest."""
    names = asked.asks()
    compact = bool(asked.disable_any_whitespace)
    if len(names) > 1:
        raise InvalidRequest(f"{param}: {' and '.join(names)} exclude each other", param=param)
    if not names:
        if compact:
            raise InvalidRequest(f"{param}.disable_any_whitespace needs json", param=param)
        return None
    name = names[0]
    if asked.json is not None and name == "json":
        return json_grammar(decoded(asked.json, f"{param}.json"), f"{param}.json", compact=compact)
    if name == "json_object":
        return json_grammar({"type": "object"}, param, compact=compact)
    if asked.regex is not None:
        return _bounded(Grammar("regex", asked.regex), f"{param}.regex")
    if asked.choice is not None:
        return _bounded(Grammar("lark", choice_lark(asked.choice, param)), f"{param}.choice")
    assert asked.grammar is not None, "one of the five is given"
    return _bounded(Grammar("lark", asked.grammar), f"{param}.grammar")


def of_response_format(asked: ResponseFormat) -> Grammar | None:
    """The grammar, or None for text. Raises InvalidRequest naming the field or the keyword."""
    param = "response_format"
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise InvalidRequest(
            f"{param}.json_schema needs type = 'json_schema', not {asked.type!r}", param=param
        )
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return json_grammar({"type": "object"}, param)
    if asked.type != "json_schema":
        raise InvalidRequest(
            f"{param}.type = {asked.type!r}: one of text, json_object, json_schema", param=param
        )
    if asked.json_schema is None:
        raise InvalidRequest(f"{param}.json_schema is required", param=f"{param}.json_schema")
    schema, where = asked.json_schema.schema, f"{param}.json_schema.schema"
    if schema is None:
        raise InvalidRequest(f"{where} is required", param=where)
    return json_grammar(schema, where, strict=bool(asked.json_schema.strict))


def decoded(schema: str | dict[str, Any] | bool, param: str) -> dict[str, Any] | bool:
    """A schema that may be given as text."""
    if not isinstance(schema, str):
        return schema
    try:
        value = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from None
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{param} is not a JSON schema: an object or a boolean", param=param)
    return value


def json_grammar(
    schema: Mapping[str, Any] | bool, param: str, *, strict: bool = False, compact: bool = False
) -> Grammar:
    """Raises InvalidRequest naming the keyword for a schema that cannot be honoured whole."""
    check_schema(schema, param, strict=strict)
    if schema is False:
        raise InvalidRequest(f"{param} is false: nothing matches it", param=param)
    body = {} if schema is True else tightened(schema)
    blanks = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITESPACE}
    text = msgspec.json.encode({**body, "x-guidance": blanks}).decode()
    return _bounded(Grammar("json", text), param)


def choice_lark(choices: list[str], param: str) -> str:
    """A Lark grammar that matches one of `choices`."""
    if "" in choices:
        raise InvalidRequest(f"{param}.choice holds an empty string", param=f"{param}.choice")
    return "start: " + " | ".join(_LARK.encode(choice).decode() for choice in choices)


def _bounded(grammar: Grammar, param: str) -> Grammar:
    if len(grammar.text) > MAX_TEXT:
        raise InvalidRequest(
            f"{param} has {len(grammar.text)} characters; {MAX_TEXT} is the most", param=param
        )
    return grammar

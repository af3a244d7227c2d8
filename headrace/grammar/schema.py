"""What is refused of a JSON schema before a grammar is made of it, with the keyword's name.

llguidance names most keywords that it does not know itself. Here are those that it would pass over
or half enforce, so that an output could end with "stop" and yet not validate; shapes of values; and
the rules of OpenAI's strict mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import InvalidRequest
from headrace.grammar.limits import MAX_DEPTH

Schema = Mapping[str, Any]

TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
# keyword -> why it is not honoured
REFUSED: Mapping[str, str] = {
    "not": "",
    "if": "",
    "then": "",
    "else": "",
    "dependentRequired": "",
    "dependentSchemas": "",
    "dependencies": "",
    "propertyNames": "",
    "unevaluatedProperties": "",
    "unevaluatedItems": "",
    "contains": "",
    "minContains": "",
    "maxContains": "",
    "$dynamicRef": "",
    "$recursiveRef": "",
    "additionalItems": "use prefixItems and items",
    "x-guidance": "it is the server's own",
}
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MOST_REMAINDERS = 100_000  # of multipleOf: the size of the automaton that counts them
MOST_COUNT = 100_000
EXACT = 2**53  # whole numbers up to here are themselves as float64
# Strict mode's schemas may hold these and no others.
STRICT = {
    *MAPS, *LISTS, *SINGLE, *COUNTS, *BOUNDS,
    "type", "enum", "const", "required", "pattern", "format", "$ref", "$schema", "$id", "title",
    "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip


def check_schema(schema: Any, param: str, *, strict: bool = False) -> None:
    """Raise InvalidRequest, whose param is `param`, for what cannot be honoured whole."""
    if strict and (not isinstance(schema, Mapping) or schema.get("type") != "object"):
        raise InvalidRequest(f"{param}: strict mode needs type = 'object' at the root", param=param)
    try:
        for where, sub in _walk(schema, ""):
            _check(sub, where)
            if strict:
                _check_strict(sub, where)
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}{error.message}", param=param) from None


def _fail(where: str, keyword: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {keyword}: {why}")


def _walk(schema: Any, where: str, depth: int = 0) -> Iterator[tuple[str, Schema]]:
    """Every schema in it that is an object, with its place. What it says in `MAPS` and `LISTS` is
    of their kind."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{where}: a schema is an object or a boolean, not {schema!r:.50}")
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{where[:80]}...: nested deeper than {MAX_DEPTH}")
    for keyword in MAPS:
        if not isinstance(schema.get(keyword, {}), Mapping):
            raise _fail(where, keyword, "it is an object of schemas")
    for keyword in LISTS:
        if not isinstance(schema.get(keyword, []), list):
            raise _fail(where, keyword, "it is a list of schemas")
    yield where, schema
    for keyword in MAPS:
        for name, sub in schema.get(keyword, {}).items():
            yield from _walk(sub, f"{where}.{keyword}.{name}", depth + 1)
    for keyword in LISTS:
        for at, sub in enumerate(schema.get(keyword, [])):
            yield from _walk(sub, f"{where}.{keyword}[{at}]", depth + 1)
    for keyword in SINGLE:
        if keyword in schema:
            if isinstance(schema[keyword], list):
                raise _fail(where, keyword, "a list of schemas is spelled prefixItems")
            yield from _walk(schema[keyword], f"{where}.{keyword}", depth + 1)


def _check(schema: Schema, where: str) -> None:
    for keyword, why in REFUSED.items():
        if keyword in schema:
            raise _fail(where, keyword, f"not supported{'; ' + why if why else ''}")
    if schema.get("uniqueItems", False) is not False:
        raise _fail(where, "uniqueItems", "not supported")
    _check_type(schema, where)
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise _fail(where, "enum", "it is a list of at least one value")
    for value in [*schema.get("enum", []), schema.get("const")]:
        if not _exact(value):
            raise _fail(where, "enum" if "enum" in schema else "const", "a number over 2**53")
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema and not schema[keyword]:
            raise _fail(where, keyword, "it is a list of at least one schema")
    for keyword in ("pattern", "format", "$ref"):
        if keyword in schema and not isinstance(schema[keyword], str):
            raise _fail(where, keyword, "it is a string")
    _check_numbers(schema, where)
    _check_required(schema, where)


def _exact(value: Any) -> bool:
    """Every number in it is written as it was read."""
    if isinstance(value, Mapping):
        return all(_exact(inner) for inner in value.values())
    if isinstance(value, list):
        return all(_exact(inner) for inner in value)
    return type(value) is not int or abs(value) <= EXACT


def _check_type(schema: Schema, where: str) -> None:
    if "type" not in schema:
        return
    given = schema["type"]
    names = given if isinstance(given, list) else [given]
    if not names:
        raise _fail(where, "type", "an empty list")
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise _fail(where, "type", f"{name!r:.50} is not one of {', '.join(TYPES)}")


def _check_numbers(schema: Schema, where: str) -> None:
    for keyword in COUNTS:
        value = schema.get(keyword, 0)
        if type(value) is not int or value < 0:
            raise _fail(where, keyword, f"{value!r:.50} is not a whole number from 0 on")
        if value > MOST_COUNT:
            raise _fail(where, keyword, f"{value} is over {MOST_COUNT}")
    for keyword in BOUNDS:
        value = schema.get(keyword, 1)
        if type(value) not in (int, float):
            raise _fail(where, keyword, f"{value!r:.50} is not a number")
        if abs(value) > EXACT:
            raise _fail(where, keyword, f"{value} is over 2**53: not exact")
    step = schema.get("multipleOf", 1)
    if step <= 0:
        raise _fail(where, "multipleOf", "it is over 0")
    digits = f"{step:.15f}".rstrip("0").partition(".")[2]
    if step * 10 ** len(digits) > MOST_REMAINDERS or len(digits) > 9:
        raise _fail(where, "multipleOf", f"{step} has too many digits")


def _check_required(schema: Schema, where: str) -> None:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _fail(where, "required", "it is a list of names")
    # Keys that are not listed in `properties` may repeat in an output, and then count once.
    if schema.get("minProperties", 0) > len(set(required)) + 1:
        raise _fail(where, "minProperties", "over the number of required keys + 1: not supported")


def _check_strict(schema: Schema, where: str) -> None:
    """OpenAI's strict mode: nothing is left open, and nothing is passed over."""
    for keyword in schema:
        if keyword not in STRICT:
            raise _fail(where, str(keyword), "strict mode does not know it")
    if schema.get("type") != "object" and "properties" not in schema:
        return
    if schema.get("additionalProperties") is not False:
        raise _fail(where, "additionalProperties", "strict mode needs false in every object")
    missing = set(schema.get("properties", {})) - set(schema.get("required", []))
    if missing:
        raise _fail(where, "required", f"strict mode needs every property: {min(missing)!r}")

"""Schemas that are hard to get right, and those to refuse, with what the refusal must name."""

from __future__ import annotations

from typing import Any

DIGITS = {"type": "integer", "minimum": 0, "maximum": 9}
NODE = {
    "type": "object",
    "properties": {"v": DIGITS, "c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    "required": ["v", "c"],
    "additionalProperties": False,
}


def closed(**properties: Any) -> dict[str, Any]:
    """An object with these keys, all of them, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def array(items: Any = None, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", **({} if items is None else {"items": items}), **keywords}


HARD: dict[str, Any] = {
    "tree": NODE,
    "linked list": {
        "$defs": {"l": {"anyOf": [{"type": "null"}, closed(next={"$ref": "#/$defs/l"})]}},
        "$ref": "#/$defs/l",
    },
    "arrays of arrays": array({"$ref": "#"}, maxItems=2),
    "mutual recursion": {
        "$defs": {
            "a": closed(b={"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}),
            "b": array({"$ref": "#/$defs/a"}, maxItems=1),
        },
        "$ref": "#/$defs/a",
    },
    "unicode constants": closed(
        é={"const": 'na"ïve \\ / \n\t😀'}, 日本={"enum": ["語", "\0", "𝒳"]}
    ),
    "enum of everything": {
        "enum": ['é"\n', "😀", 1.5, 1e-7, 2**53, None, True, [1, [2, {"a": None}]], {"b": 1}, ""]
    },
    "odd keys": closed(**{'a"b': DIGITS, "": {"type": "null"}, "\\": True, "\n": {"type": "null"}}),
    "integer range": {"type": "integer", "minimum": -3, "maximum": 12},
    "integer from": {"type": "integer", "exclusiveMinimum": 0},
    "integer between": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 7},
    "integer far": {"type": "integer", "minimum": -1000000, "maximum": -999990},
    "integer bounds as floats": {"type": "integer", "minimum": 1e3, "maximum": 1.5e3},
    "multiple of 5": {"type": "integer", "multipleOf": 5},
    "multiple in range": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 100},
    "number range": {"type": "number", "minimum": -0.5, "maximum": 0.25},
    "number open range": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "one number": {"type": "number", "minimum": 0.1, "maximum": 0.1},
    "tenths": {"type": "number", "multipleOf": 0.1},
    "cents": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 10},
    "bound without type": {"minimum": 5},
    "two types, bounds of each": {"type": ["integer", "string"], "minimum": 5, "maxLength": 2},
    "exactly two": array({"type": "integer"}, minItems=2, maxItems=2),
    "tuple": array(False, prefixItems=[DIGITS, string(maxLength=3)], minItems=2),
    "tuple and rest": array(
        {"type": "boolean"}, prefixItems=[DIGITS, {"type": "null"}], minItems=1, maxItems=4
    ),
    "cube": array(array(array({"type": "null"}, minItems=1, maxItems=2), maxItems=2), maxItems=2),
    "no items": array(maxItems=0),
    "items false": array(False),
    "array of enums": array({"enum": ["a", "b"]}, minItems=3, maxItems=5),
    "at most 8 characters": string(maxLength=8),
    "3 to 5 characters": string(minLength=3, maxLength=5),
    "pattern": string(pattern="^[a-z]{2,4}-\\d+$"),
    "alternatives without group": string(pattern="^(a|b)$|^c$"),
    "pattern and length": string(pattern="^(?:x|yy)+$", minLength=3, maxLength=6),
    "three of anything": string(pattern="^.{3}$"),
    "escapes in a pattern": string(pattern="^[\\u00e9\\x41]+$"),
    "pattern that needs escapes": string(pattern='^["\\\\]{2}$'),
    "empty object": closed(),
    "map of integers": {"type": "object", "additionalProperties": DIGITS, "maxProperties": 2},
    "known and other keys": {
        "type": "object",
        "properties": {"a": DIGITS},
        "additionalProperties": string(maxLength=2),
        "maxProperties": 3,
        "required": ["a"],
    },
    "optional keys": {
        "type": "object",
        "properties": {"a": DIGITS, "b": {"type": "null"}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "required, not listed": {"type": "object", "required": ["z", "y"], "maxProperties": 2},
    "patterns of keys": {
        "type": "object",
        "patternProperties": {"^n_[a-z]$": DIGITS, "^s_[a-z]$": string(maxLength=2)},
        "additionalProperties": False,
    },
    "key listed and matched": {
        "type": "object",
        "properties": {"ab": {"minimum": 3}},
        "patternProperties": {"^a": DIGITS},
        "required": ["ab"],
        "additionalProperties": False,
    },
    "at least one key": {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 2,
        "additionalProperties": {"type": "null"},
    },
    "one of two shapes": {
        "oneOf": [
            closed(k={"const": "a"}, x=DIGITS),
            closed(k={"const": "b"}, y=string(maxLength=3)),
        ]
    },
    "any of types": {"anyOf": [{"type": "integer", "minimum": 3}, string(maxLength=1)]},
    "any of beside keywords": {
        "type": "object",
        "properties": {"a": DIGITS, "b": DIGITS},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "all of bounds": {
        "allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}, {"multipleOf": 3}]
    },
    "all of strings": {"allOf": [string(minLength=2), {"pattern": "^a"}, {"maxLength": 4}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": DIGITS}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"], "maxProperties": 2},
        ]
    },
    "reference with siblings": closed(a={"$ref": "#/$defs/p", "maximum": 3})
    | {"$defs": {"p": {"type": "integer", "minimum": 1}}},
    "escaped pointers": {
        "definitions": {"a/b": {"type": "null"}, "c~d": {"type": "boolean"}},
        "anyOf": [{"$ref": "#/definitions/a~1b"}, {"$ref": "#/definitions/c~0d"}],
    },
    "constant object": {"const": {"a": [1, 2, {"b": "x"}]}},
    "enum filtered by type": {"enum": [1, "1", 1.5], "type": "string"},
    "enum filtered by pattern": string(enum=["a", "b"], pattern="b"),
    "enum of objects, filtered": {
        "enum": [{"a": 1}, {"a": 2}],
        "properties": {"a": {"minimum": 2}},
    },
    "impossible optional key": {"type": "object", "properties": {"a": False}, "maxProperties": 0},
    "deep": closed(a=closed(b=closed(c=array(closed(d={"enum": [1]}), minItems=1, maxItems=2)))),
    "boolean or null": {"type": ["boolean", "null"]},
    "uuid of a kind": string(format="uuid", pattern="^0"),
    "date": string(format="date"),
    "date and time": string(format="date-time"),
    "time": string(format="time"),
    "duration": string(format="duration"),
    "ipv4": string(format="ipv4"),
    "ipv6": string(format="ipv6"),
    "hostname": string(format="hostname", maxLength=20),
    "short email": string(format="email", maxLength=12),
    "uri": string(format="uri", maxLength=30),
}

# schema -> what the message must hold
REFUSED: list[tuple[Any, str]] = [
    ({"type": "not-a-type"}, "type"),
    ({"type": ["string", "nope"]}, "type"),
    ({"type": []}, "type"),
    ({"$ref": "#/nowhere"}, "$ref"),
    ({"$ref": "https://example.com/schema"}, "$ref"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "$ref"),
    ({"$ref": "#"}, "nothing can match"),
    ({"enum": []}, "enum"),
    (closed(x={"enum": []}), "enum"),
    ({"enum": [2**64]}, "enum"),
    ({"const": 2**63}, "const"),
    (string(pattern="(?<=x)*"), "pattern"),
    (string(pattern="["), "pattern"),
    (string(pattern="*a"), "pattern"),
    (string(pattern="\\bfoo"), "pattern"),
    (string(format="nope"), "format"),
    (string(minLength=5, maxLength=2), "minLength"),
    (array(minItems=5, maxItems=2), "minItems"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "integer", "maximum": 1e25}, "maximum"),
    ({"minLength": -1}, "minLength"),
    ({"maxItems": 1.5}, "maxItems"),
    ({"exclusiveMinimum": True, "minimum": 3}, "exclusiveMinimum"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"multipleOf": -1}, "multipleOf"),
    ({"type": "integer", "multipleOf": 99999937}, "multipleOf"),
    ({"required": "a"}, "required"),
    ({"properties": []}, "properties"),
    ({"properties": {"a": 5}}, "properties.a"),
    ({"items": [DIGITS]}, "prefixItems"),
    ({"additionalItems": False}, "additionalItems"),
    ({"anyOf": []}, "anyOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"not": {"type": "null"}}, "not"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
    ({"type": "array", "contains": DIGITS}, "contains"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"type": "object", "minProperties": 3}, "minProperties"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    (False, "false"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
]

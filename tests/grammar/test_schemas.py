"""Whatever comes to its end validates under `jsonschema`, formats and all; the rest is refused by
the keyword's name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from headrace.errors import InvalidRequest
from headrace.grammar.asked import json_grammar
from headrace.grammar.checker import verdict
from headrace.messages import Grammar
from tests.grammar.hard_schemas import HARD, REFUSED, closed, string
from tests.grammar.walk import matcher, outputs, refusal, tokenizer, walk


@pytest.mark.parametrize("name", HARD)
def test_hard_schemas(name: str) -> None:
    assert len(outputs(HARD[name], walks=10)) >= 4


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=lambda x: str(x)[:40])
def test_refused_by_name(schema: Any, named: str) -> None:
    assert named in (refusal(schema) or "")


numbers = st.integers(-20, 20)
names = st.sampled_from(["a", "b", "long name", "é", 'x"y', "0"])
values = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=4), st.floats(-9, 9, width=16)
)


def _some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def _typed(name: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return _some(**keywords).map(lambda found: {"type": name, **found})


formats = st.sampled_from(["date", "time", "date-time", "ipv4", "ipv6", "uuid", "duration"])
patterns = st.sampled_from(["^a+$", "^[a-c]{2,3}$", "^(x|yz)*$", "^\\d\\.\\d$", "^.?.?$", '^"?$'])
small = st.integers(0, 4)
leaves = st.one_of(
    st.just(True),
    _some(const=values),
    _some(enum=st.lists(values, min_size=1, max_size=4)),
    _typed("integer", minimum=numbers, maximum=numbers, multipleOf=st.integers(1, 9)),
    _typed("integer", exclusiveMinimum=numbers, exclusiveMaximum=numbers),
    _typed("number", minimum=numbers, exclusiveMaximum=numbers),
    _typed("string", minLength=small, maxLength=st.integers(2, 6), pattern=patterns),
    _typed("string", format=formats),
    st.sampled_from(["null", "boolean", "string"]).map(lambda name: {"type": name}),
    st.just({"type": ["integer", "null"]}),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return _typed(
        "object",
        properties=st.dictionaries(names, inner, max_size=4),
        required=st.lists(names, max_size=3, unique=True),
        additionalProperties=st.one_of(st.just(False), inner),
        patternProperties=st.just({"^p_[a-z]$": {"type": "integer"}}),
        maxProperties=small,
        minProperties=st.integers(0, 1),
    )


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        _objects(inner),
        _objects(inner),
        _typed("array", items=inner, minItems=st.integers(0, 2), maxItems=small),
        _typed("array", prefixItems=several, items=st.one_of(st.just(False), inner)),
        _some(anyOf=several),
        _some(oneOf=several),
        _some(allOf=several),
        st.tuples(_objects(inner), _some(anyOf=several)).map(lambda two: {**two[0], **two[1]}),
    )


schemas = st.recursive(leaves, _deeper, max_leaves=8)


def test_generated_schemas() -> None:
    finished: list[int] = []

    @settings(
        max_examples=200,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas, st.integers(0, 2**32))
    def each(schema: Any, seed: int) -> None:
        with suppress(InvalidRequest):  # it says why: test_refused_by_name
            finished.extend(map(len, outputs(schema, walks=2, seed=seed, most=150, eager=20)))

    each()
    assert len(finished) > 200, "most schemas are honoured, and most walks come to an end"


def test_b064_each_member_of_an_enum_can_come() -> None:
    members = ['é"\n', "😀", 1.5, -3, None, True, {"a": ["b"]}, ""]
    found = {json.dumps(json.loads(out)) for out in outputs({"enum": members}, walks=400)}
    assert found == {json.dumps(member) for member in members}


def test_b066_any_object_and_any_value() -> None:
    for schema in ({"type": "object"}, {}, True):
        assert len(outputs(schema, walks=20)) > 5


def test_b067_blanks_are_bounded() -> None:
    start = matcher(json_grammar(closed(a={"type": "null"}, b={"type": "null"}), "schema"))
    at = start.clone()
    at.advance(ord("{"))
    for blank in "\n\n" + " " * 20:
        at.advance(ord(blank))
    with pytest.raises(Exception, match="cannot be followed"):
        at.advance(ord(" "))


def test_compact_json_has_no_blanks() -> None:
    schema = closed(a=string(pattern="^x*$", maxLength=3), b={"type": "null"})
    for out in outputs(schema, walks=20, compact=True):
        assert out.split() == [out]


def test_b070_additional_properties() -> None:
    def kinds(schema: dict[str, Any]) -> set[str]:
        return {key for out in outputs(schema, walks=60) for key in json.loads(out)}

    base = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    assert kinds(base) - {"a", "b"}, "absent means allowed, as JSON Schema has it"
    assert kinds({**base, "additionalProperties": False}) == {"a", "b"}
    ordered = outputs({**base, "required": ["a", "b"], "additionalProperties": False}, walks=9)
    assert {tuple(json.loads(out)) for out in ordered} == {("b", "a")}, "the order of properties"


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, "additionalProperties"),
        (closed(a={}) | {"required": []}, "required"),
        (closed(a={"type": "object", "properties": {}}), "additionalProperties"),
        ({"anyOf": [closed()]}, "type = 'object'"),
        (closed(a={"type": "string", "minLenght": 3}), "minLenght"),
    ],
)
def test_strict_mode(schema: dict[str, Any], named: str) -> None:
    json_grammar(closed(a=closed(b=string())), "schema", strict=True)
    json_grammar(schema, "schema")
    with pytest.raises(InvalidRequest, match=named):
        json_grammar(schema, "schema", strict=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("odd", [None, 5, "x", ["x"]])
def test_what_holds_schemas_holds_nothing_else(odd: Any, strict: bool) -> None:
    for schema, named in (
        ({"type": "object", "additionalProperties": False, "properties": odd}, "an object of"),
        (closed(a={"anyOf": odd}), "a list of|a schema is"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            json_grammar(schema, "schema", strict=strict)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(?<=x)*"),
        ("regex", "["),
        ("regex", "(" * 5000 + "a" + ")" * 5000),
        ("regex", "*"),
        ("lark", "(" * 10_000),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("lark", 'x: "a"'),
        ("lark", "start: missing"),
        ("json", "[" * 10_000),
        ("json", '{"items":' * 5000 + "{}" + "}" * 5000),
        ("json", "[]"),
    ],
)
def test_b068_what_cannot_be_compiled_is_said(kind: Any, text: str) -> None:
    assert verdict(tokenizer(), Grammar(kind, text))


def test_regex_choice_and_lark() -> None:
    from random import Random

    def every(grammar: Grammar) -> set[bytes | None]:
        return {walk(matcher(grammar), Random(i)) for i in range(60)}

    assert every(Grammar("regex", "ab?|c")) == {b"a", b"ab", b"c"}
    assert every(Grammar("lark", 'start: "x" inner\ninner: "y" | "😀"')) == {b"xy", "x😀".encode()}

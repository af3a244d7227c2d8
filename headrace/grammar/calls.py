"""Tool calls as a grammar: the model's own form, with arguments that match their schemas.

What is written here is what `text/calls` reads; a test ties the two. Blanks between calls, and
inside of a call around its arguments, are those that the form's models write.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import InvalidRequest
from headrace.grammar.asked import json_grammar
from headrace.grammar.vocabulary import special_name
from headrace.messages import Grammar

MOST_CALLS = 16  # of one answer, where a grammar makes them
_DEFINITIONS = ("$defs", "definitions")


class Offer(msgspec.Struct, frozen=True):
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    strict: bool
    param: str  # where the request has the schema


class Way(msgspec.Struct, frozen=True):
    """How the model writes: the marks of its form of calls and of its reasoning; "" = none."""

    form: str  # hermes, llama, mistral, mistral-args, pythonic
    opens: str = ""  # pythonic: around the list
    closes: str = ""
    thinks: str = ""  # marks of reasoning that may go before everything
    thought: str = ""
    inside: bool = False  # the prompt has opened the reasoning
    special: Collection[str] = ()  # texts that are special tokens of this tokenizer


def forced(way: Way, tools: Sequence[Offer], most: int) -> Grammar:
    """From one to `most` calls and nothing else. Raises InvalidRequest naming the schema."""
    lines = [f"start: {_think(way)} calls"]
    return _made(way, [*lines, *_calls(way, tools, most)])


def offered(way: Way, tools: Sequence[Offer], most: int, text: Grammar | None) -> Grammar:
    """Text, which may match `text`, or calls, at most so many, behind some text or none; they end
    the answer. Raises InvalidRequest."""
    calls = _calls(way, tools, most)
    if text is not None:
        assert text.kind == "json", "response_format makes JSON"
        lines = [f"start: {_think(way)} (calls | json)", f"json: %json {text.text}"]
    elif way.form in ("llama", "pythonic") and not way.opens:
        first = "{" if way.form == "llama" else r"\["
        lines = [
            f"start: {_think(way)} (calls | plain)?",
            f"plain: /[ \\n]*[^ \\n{first}](.|\\n)*/",
        ]
    else:
        mark = {"hermes": "<tool_call>", "pythonic": way.opens}.get(way.form, "[TOOL_CALLS]")
        lines = [f"start: {_think(way)} (trigger behind | rest)", "rest: REST", "REST: /(.|\\n)*/"]
        if mark in way.special:
            lines.append(f"trigger: REST {_mark(way, mark)}")
        else:
            lines.append(f"trigger[lazy]: REST {json.dumps(mark)}")
    return _made(way, [*lines, *calls])


def after_thinking(way: Way, grammar: Grammar) -> Grammar:
    """JSON behind the reasoning. What is not JSON is taken as it is: for the whole output."""
    if grammar.kind != "json" or not way.thinks:
        return grammar
    return _made(way, [f"start: {_think(way)} answer", f"answer: %json {grammar.text}"])


def _think(way: Way) -> str:
    """Reasoning may go first, or must, where the prompt has begun it."""
    if not way.thinks:
        return ""
    return "thinking blanks" if way.inside else "(begin thinking blanks)?"


def _made(way: Way, lines: list[str]) -> Grammar:
    if way.thinks:
        lines.append("blanks: /[ \\n]{0,3}/")
        lines.append(f"begin: {_mark(way, way.thinks)}")
        if way.thought in way.special:
            lines += [f"thinking: THOUGHT {_mark(way, way.thought)}", "THOUGHT: /(.|\\n)*/"]
        else:
            lines += [f"thinking[lazy]: THOUGHT {json.dumps(way.thought)}", "THOUGHT: /(.|\\n)*/"]
    return Grammar("lark", "\n".join(lines))


def _mark(way: Way, text: str) -> str:
    return special_name(text) if text in way.special else json.dumps(text)


def _calls(way: Way, tools: Sequence[Offer], most: int) -> list[str]:
    """The rules `calls`, and `behind`: what follows once the first mark is written."""
    one = " | ".join(f"call{at}" for at in range(len(tools)))
    rules = [line for at, tool in enumerate(tools) for line in _call(way, tool, at)]
    more = most - 1

    def row(between: str) -> str:
        again = f" ({json.dumps(between)} call){{0,{more}}}" if more else ""
        return "call" + again

    rules.append(f"call: {one}")
    if way.form == "hermes":
        mark, end = _mark(way, "<tool_call>"), _mark(way, "</tool_call>")
        rules.append(f'body: "\\n" call "\\n" {end}')
        again = f' ("\\n" {mark} body){{0,{more}}}' if more else ""
        rules += [f"behind: body{again}", f"calls: {mark} behind"]
    elif way.form == "llama":
        rules.append(f"calls: {row('; ')}")
    elif way.form == "mistral":
        rules += [f'behind: "[" {row(", ")} "]"', f"calls: {_mark(way, '[TOOL_CALLS]')} behind"]
    elif way.form == "mistral-args":
        mark = _mark(way, "[TOOL_CALLS]")
        again = f" ({mark} call){{0,{more}}}" if more else ""
        rules += [f"behind: call{again}", f"calls: {mark} behind"]
    else:
        opens = _mark(way, way.opens) if way.opens else ""
        closes = _mark(way, way.closes) if way.closes else ""
        rules += [f'behind: "[" {row(", ")} "]" {closes}', f"calls: {opens} behind"]
    return rules


def _call(way: Way, tool: Offer, at: int) -> list[str]:
    """The rule `call{at}`."""
    if way.form == "pythonic":
        return _pythonic(tool, at)
    schema = _schema(tool.parameters, tool)
    arguments = f"arguments{at}"
    name = json.dumps(tool.name)
    if way.form == "mistral-args":
        rule = f"{name} {_mark(way, '[ARGS]')} {arguments}"
    elif way.form == "llama":  # in pieces: one long text would hide JSON that begins like it
        pieces = ("{", '"name"', ": ", name, ", ", '"parameters"', ": ")
        rule = f'{" ".join(map(json.dumps, pieces))} {arguments} "}}"'
    else:
        head = f'{{"name": {name}, "arguments": '
        rule = f'{json.dumps(head)} {arguments} "}}"'
    return [f"call{at}: {rule}", f"{arguments}: %json {schema}"]


def _schema(schema: Mapping[str, Any], tool: Offer) -> str:
    """Of a tool that is not strict, a schema that cannot be enforced is `loosened`."""
    try:
        return json_grammar(schema, tool.param, strict=tool.strict).text
    except InvalidRequest:
        if tool.strict:
            raise
        return json_grammar(loosened(schema), tool.param).text


def loosened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An object with the same names, of any values."""
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    needed = required if isinstance(required, list) else []
    return {
        "type": "object",
        "properties": {name: {} for name in names},
        "required": [name for name in needed if isinstance(name, str)],
    }


def _pythonic(tool: Offer, at: int) -> list[str]:
    """f(a=..., b=...): required parameters first, then optional ones, each as the schema has it."""
    schema = tool.parameters
    properties, needed = schema.get("properties") or {}, schema.get("required")
    where = f"{tool.param}: the pythonic form of calls"
    if not isinstance(properties, Mapping) or any(k in schema for k in ("anyOf", "oneOf", "$ref")):
        raise InvalidRequest(f"{where} needs an object with properties", param=tool.param)
    defs = {key: schema[key] for key in _DEFINITIONS if key in schema}
    rules, given = [], []
    listed = needed if isinstance(needed, list) else []
    required = [name for name in listed if isinstance(name, str) and name in properties]
    optional = [name for name in properties if name not in required]
    for number, name in enumerate([*required, *optional]):
        if not name.isidentifier() or not tool.name.isidentifier():
            raise InvalidRequest(f"{where} needs identifiers as names", param=tool.param)
        inner = properties[name]
        if _refers_up(inner):
            raise InvalidRequest(f"{where} takes a $ref into $defs only", param=tool.param)
        inner = {**inner, **defs} if isinstance(inner, Mapping) and defs else inner
        given.append(f"value{at}_{number}")
        try:
            text = json_grammar(inner, tool.param).text
        except InvalidRequest:
            if tool.strict:
                raise
            text = json_grammar(True, tool.param).text
        rules.append(f"{given[-1]}: {json.dumps(name + '=')} json{at}_{number}")
        rules.append(f"json{at}_{number}: %json {text}")
    fixed, free = given[: len(required)], given[len(required) :]
    body = ' ", " '.join(fixed)
    tails = [f'(", " {name})?' for name in free]
    if fixed:
        body += " " + " ".join(tails)
    elif free:
        chains = [" ".join([name, *tails[i + 1 :]]) for i, name in enumerate(free)]
        body = f"({' | '.join(chains)})?"
    return [f'call{at}: {json.dumps(tool.name + "(")} {body} ")"', *rules]


def _refers_up(schema: Any) -> bool:
    """A $ref that means something else once the property's schema stands alone."""
    if isinstance(schema, Mapping):
        target = schema.get("$ref")
        known = tuple(f"#/{key}/" for key in _DEFINITIONS)
        up = isinstance(target, str) and not target.startswith(known)
        return up or any(_refers_up(inner) for inner in schema.values())
    return isinstance(schema, list) and any(_refers_up(inner) for inner in schema)

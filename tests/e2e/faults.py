"""Requests that hurt other servers: ranges (E), lengths (F), messages (G), output's form (I)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "word " * 12_000  # over any context that a test gives
OK, BAD = (200,), (400,)


class Fault(NamedTuple):
    """A request, and the statuses that are right. `body`: JSON, or the bytes themselves."""

    name: str
    path: str
    body: Any
    right: tuple[int, ...]
    headers: tuple[tuple[str, str], ...] = ()


def text(name: str, right: tuple[int, ...], **fields: Any) -> Fault:
    return Fault(name, TEXT, {"prompt": "x", "max_tokens": 4, **fields}, right)


def chat(name: str, right: tuple[int, ...], *messages: Any, **fields: Any) -> Fault:
    return Fault(name, CHAT, {"messages": list(messages), "max_tokens": 4, **fields}, right)


def said(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def form(name: str, right: tuple[int, ...], **form: Any) -> Fault:
    return chat(name, right, said("user"), structured_outputs=form, max_tokens=12)


ILLEGAL: list[Any] = [
    [-1], [[-1]], [99999999], [5279552648203111001], [1.5], [], [[]], ["x", [1]],
]  # fmt: skip
E = [
    *(text("B035", BAD, logit_bias=bias) for bias in (
        {"99999999": -100}, {"-1": 1}, {"abc": 1}, {"5.0": 1}, {"5": 101}, {"5": None},
    )),
    text("B035", OK, logit_bias={}),
    *(text("B036", OK, temperature=low, ignore_eos=True) for low in (1e-4, 1e-6, 1e-30)),
    *(Fault("B037", TEXT, f'{{"prompt": "x", "{key}": {value}}}'.encode(), BAD) for key, value in (
        ("temperature", "NaN"), ("temperature", "1e999"), ("top_p", "Infinity"), ("top_p", "-1"),
        ("top_p", "1.5"), ("repetition_penalty", "0"), ("min_p", "2"),
    )),
    *(text("B038", OK, top_k=k, temperature=1, seed=1) for k in (9999999, 0, -1, 1)),
    text("B038", BAD, top_k=-2),
    *(text("B039", OK, top_p=p, temperature=1.5, logprobs=2, seed=1) for p in (0, 1e-9)),
    text("B040", OK, structured_outputs={"json": {}}, temperature=0, logprobs=1),
    text("B040", OK, top_p=0.9, temperature=1, logprobs=1, seed=1),
    text("B041", OK, temperature=2, return_token_ids=True, ignore_eos=True, seed=1),
    *(text("B042", BAD, prompt=ids) for ids in ILLEGAL),
]  # fmt: skip

F = [
    text("B044", BAD, prompt=LONG),
    text("B044", BAD, prompt=LONG, stream=True),
    chat("B045", BAD, said("user", "Reply with the word PLUM\n" + LONG)),
    *(text("B046", (200, 400), prompt=prompt) for prompt in ("", [""], ["", ""], [])),
    chat("B046", BAD),
    chat("B046", (200, 400), said("user", "")),
    *(text("B047", BAD, **{field: value}) for field, value in (
        ("max_tokens", "many"), ("temperature", []), ("stop", {}), ("n", "two"),
        ("stream", "yes"), ("seed", 2**70), ("logprobs", -5), ("stop_token_ids", "x"),
    )),
    Fault("B047", TEXT, b'{"prompt": "x"', BAD),
    Fault("B047", TEXT, b"[]", BAD),
    Fault("B047", CHAT, b"\xff\xfe", BAD),
    Fault("B047", TEXT, b"prompt=x", (415,), (("content-type", "text/plain"),)),
    text("B047", (404,), model="another"),
    Fault("B047", "/v1/nothing", {}, (404,)),
    text("B048", BAD, prompt="x " * 60, max_tokens=10**6),
    *(text("B049", BAD, max_tokens=most) for most in (0, -1, 10**9, "5", 1.5)),
    text("B049", OK, max_tokens=1),
    chat("B049", BAD, said("user"), max_tokens=3, max_completion_tokens=4),
]  # fmt: skip

CALL = {"id": "1", "type": "function", "function": {"name": "get_code", "arguments": "{}"}}
ANSWER = said("tool", "42.7", tool_call_id="1")
G = [
    chat("B052", OK, said("system"), said("user")),
    chat("B053", OK, said("user"), said("user")),
    chat("B053", (200, 400), said("assistant")),
    chat("B053", BAD, ANSWER),
    chat("B053", BAD, said("wizard")),
    chat("B054", OK, said("user"), said("assistant", None, tool_calls=[CALL]), ANSWER),
    chat("B054", OK, said("user"), {"role": "assistant", "tool_calls": [CALL]}, ANSWER),
    chat("B054", BAD, said("user"), said("assistant", None, tool_calls=[{"id": 1}]), ANSWER),
    chat("B055", OK, said("user"), said("assistant", ""), said("user")),
    Fault("B056", "/tokenize", {"messages": [said("user", "hi")]}, OK),
    chat("B056", BAD, said("user", [{"type": "image_url", "image_url": {"url": "data:,"}}])),
]

WIDE = {"anyOf": [
    {"type": "object", "properties": {f"f{i}_{j}": {"enum": list(range(200))} for j in range(10)}}
    for i in range(20)
]}  # fmt: skip
I = [  # noqa: E741  the group's own name
    form("B064", BAD, json={"type": "object", "properties": {"x": {"enum": []}},
                            "required": ["x"]}),
    form("B064", OK, json={"enum": ['é"\n', "🫠", 1.5, None]}),
    form("B065", OK, json={"type": "array", "items": {"type": "string", "maxLength": 8},
                           "minItems": 2, "maxItems": 2}),
    form("B065", OK, json={"type": "integer", "minimum": -3, "maximum": 12}),
    form("B066", OK, json={"type": "object"}),
    form("B066", OK, json={}),
    form("B067", OK, json={"type": "object", "properties": {"a": {"type": "string"}},
                           "required": ["a"]}),
    form("B068", BAD, json={"type": "not-a-type"}),
    form("B068", BAD, json={"$ref": "#/nowhere"}),
    form("B068", BAD, json={"type": "string", "pattern": "(?<=x)*"}),
    form("B068", BAD, regex="(" * 10_000),
    form("B068", BAD, regex="["),
    form("B068", BAD, grammar="start: ["),
    form("B069", (200, 400, 503), json=WIDE),
    form("B070", OK, json={"type": "object", "properties": {"a": {"type": "null"}},
                           "additionalProperties": False, "required": ["a"]}),
]  # fmt: skip

GROUPS = {"E": E, "F": F, "G": G, "I": I}


def raw(fault: Fault) -> bytes:
    """The body's bytes."""
    return fault.body if isinstance(fault.body, bytes) else json.dumps(fault.body).encode()

"""docs/conformance.md, walked: every field of every protocol is there, and every row is true.

A row says what to send and what shows that it is so. It is sent to a server on the fake model with
and without the field.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from headrace.api.message_blocks import Countable, Messages
from headrace.api.response_items import Responses
from headrace.api.schemas import ACCEPTED, CHAT_ONLY, NOT_YET, Chat, Completion
from headrace.draws import Draws
from tests.e2e.serving import Server

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
CLASSES = ("honoured", "refused", "ignored")
ROW = re.compile(r"^\| `([\w.]+)` \| (\w+) \| `(.+?)` \| (.+) \|$", re.MULTILINE)


class Protocol(msgspec.Struct, frozen=True):
    """One section of the page, and where its requests go."""

    path: str
    kind: type[msgspec.Struct]
    base: dict[str, Any]
    text: str  # path to the text of an answer
    count: str  # path to the tokens of an answer
    official: frozenset[str]  # what the reference's own client knows

    @property
    def harmless(self) -> frozenset[str]:
        found: frozenset[str] = getattr(self.kind, "HARMLESS", ACCEPTED)
        return found

    @property
    def refused(self) -> frozenset[str]:
        chat_only = CHAT_ONLY if self.kind is Completion else {}
        return frozenset({**getattr(self.kind, "REFUSED", NOT_YET), **chat_only})


def names(*kinds: Any) -> frozenset[str]:
    return frozenset(name for kind in kinds for name in kind.__annotations__) | {"stream"}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


PROTOCOLS = {
    "/v1/chat/completions": Protocol(
        "/v1/chat/completions",
        Chat,
        {"messages": user("a chat that is long enough"), "max_tokens": 24, "seed": 5},
        "choices.0.message.content",
        "usage.completion_tokens",
        names(chat_create_params.CompletionCreateParamsBase),
    ),
    "/v1/completions": Protocol(
        "/v1/completions",
        Completion,
        {"prompt": "a completion that is long enough", "max_tokens": 24, "seed": 5},
        "choices.0.text",
        "usage.completion_tokens",
        names(completion_create_params.CompletionCreateParamsBase),
    ),
    "/v1/responses": Protocol(
        "/v1/responses",
        Responses,
        {"input": "a response that is long enough", "max_output_tokens": 24, "seed": 5},
        "output.0.content.0.text",
        "usage.output_tokens",
        names(response_create_params.ResponseCreateParamsBase),
    ),
    "/v1/messages": Protocol(
        "/v1/messages",
        Messages,
        {"messages": user("a message that is long enough"), "max_tokens": 24, "seed": 5},
        "content.0.text",
        "usage.output_tokens",
        names(message_create_params.MessageCreateParamsBase),
    ),
    "/v1/messages/count_tokens": Protocol(
        "/v1/messages/count_tokens",
        Countable,
        {"messages": user("a message that is long enough")},
        "input_tokens",
        "input_tokens",
        names(message_count_tokens_params.MessageCountTokensParams) - {"stream"},
    ),
}
DRAWING = "Drawing"  # a section for all of them


class Row(msgspec.Struct, frozen=True):
    """One field: its class, what to send, and what shows it."""

    field: str
    kind: str
    send: dict[str, Any]
    shown: str

    @property
    def top(self) -> str:
        """The field of the body."""
        return self.field.partition(".")[0]


def sections() -> dict[str, list[Row]]:
    out = {}
    for part in PAGE.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        written = [line for line in text.splitlines() if line.startswith("| `")]
        rows = [
            Row(field, kind, json.loads(send), shown)
            for field, kind, send, shown in ROW.findall(text)
        ]
        assert len(rows) == len(written), f"{title}: a row that does not read"
        out[title.strip("`")] = rows
    return out


SECTIONS = sections()
CASES = [
    (path, row) for path in PROTOCOLS for row in (*SECTIONS.get(path, ()), *SECTIONS[DRAWING])
    if path != "/v1/messages/count_tokens" or row in SECTIONS[path]
]  # fmt: skip


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server


def test_the_sections() -> None:
    assert set(SECTIONS) == {*PROTOCOLS, DRAWING}
    for rows in SECTIONS.values():
        fields = [row.field for row in rows]
        assert len(fields) == len(set(fields)), "a field has one row"
        assert {row.kind for row in rows} <= set(CLASSES)
        assert all(row.top in row.send for row in rows), "a row sends its field"


@pytest.mark.parametrize("path", PROTOCOLS)
def test_every_field_has_its_row(path: str) -> None:
    protocol = PROTOCOLS[path]
    rows = [row for row in (*SECTIONS[path], *SECTIONS[DRAWING]) if "." not in row.field]
    of_kind = {kind: {row.field for row in rows if row.kind == kind} for kind in CLASSES}
    assert {row.field for row in SECTIONS[DRAWING]} == set(Draws.__struct_fields__)
    assert of_kind["honoured"] >= set(protocol.kind.__struct_fields__) - of_kind["refused"]
    every = set().union(*of_kind.values())
    known = {*protocol.kind.__struct_fields__, *protocol.harmless, *protocol.refused}
    assert known == every, "what the code knows is what the page has"
    assert protocol.official <= every, "what the reference's client may send has its row"


def at(answer: Any, path: str) -> Any:
    """A member by its path; KeyError, IndexError or TypeError if there is none."""
    for step in path.split("."):
        answer = answer[int(step)] if isinstance(answer, list) else answer[step]
    return answer


def without(row: Row, protocol: Protocol) -> dict[str, Any]:
    """The same request without the field: with the base's value if it has one."""
    first, _, rest = row.field.partition(".")
    body = {**protocol.base, **{k: v for k, v in row.send.items() if k != first}}
    if rest and isinstance(row.send[first], dict):
        inner = {k: v for k, v in row.send[first].items() if k != rest}
        body |= {first: inner} if inner else {}
    return body


class Sent(msgspec.Struct, frozen=True):
    """An answer."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


def send(server: Server, path: str, body: Any) -> Sent:
    return Sent(*server.request("POST", path, body))


@pytest.mark.parametrize(("path", "row"), CASES, ids=[f"{path}-{row.field}" for path, row in CASES])
def test_a_row(server: Server, path: str, row: Row) -> None:
    protocol = PROTOCOLS[path]
    answer = send(server, path, {**protocol.base, **row.send})
    if row.kind == "refused":
        message = answer.json["error"]["message"]
        assert (answer.status, f"`{message}`") == (400, row.shown)
        return
    assert answer.status == 200, answer.raw
    assert row.top not in answer.headers.get("x-headrace-ignored-fields", "").split(", ")
    if row.kind == "ignored":
        plain = send(server, path, without(row, protocol))
        assert at(plain.json, protocol.text) == at(answer.json, protocol.text)
        assert row.shown, "why"
        return
    for claim in row.shown.split("; "):
        check(server, protocol, row, answer, claim)


def check(server: Server, protocol: Protocol, row: Row, answer: Sent, claim: str) -> None:
    """One claim of a row that is honoured."""
    if claim == "the answer changes":
        claim = f"`{protocol.text}` changes"
    if claim == "the count changes":
        claim = f"`{protocol.count}` changes"
    if claim == "the answer is a stream":
        assert answer.headers["content-type"].startswith("text/event-stream")
    elif match := re.fullmatch(r"the stream holds `(.+)`", claim):
        assert match[1].encode() in answer.raw
    elif match := re.fullmatch(r"the stream lacks `(.+)`", claim):
        assert match[1].encode() not in answer.raw
        assert match[1].encode() in send(server, protocol.path, without(row, protocol)).raw
    elif match := re.fullmatch(r"`(.+)` is a (40[04])", claim):
        body = {**protocol.base, **row.send, **wrong(row, json.loads(match[1]))}
        refused = send(server, protocol.path, body)
        assert refused.status == int(match[2]), refused.raw
        error = refused.json["error"]
        assert row.top in str(error.get("param")) or row.top in error["message"]
    elif match := re.fullmatch(r"`([\w.]+)` changes", claim):
        if "cache" in match[1]:  # no row before this one need have filled the cache
            send(server, protocol.path, without(row, protocol))
        plain = send(server, protocol.path, without(row, protocol))
        assert plain.status == 200, plain.raw
        assert at(plain.json, match[1]) != at(answer.json, match[1])
    elif match := re.fullmatch(r"`([\w.]+)` is `(.+)`", claim):
        assert at(answer.json, match[1]) == json.loads(match[2])
    elif match := re.fullmatch(r"`([\w.]+)` is there", claim):
        at(answer.json, match[1])
        plain = send(server, protocol.path, without(row, protocol))
        with pytest.raises((KeyError, IndexError, TypeError)):
            at(plain.json, match[1])
    else:
        pytest.fail(f"{row.field}: nobody can check {claim!r}")


def wrong(row: Row, value: Any) -> dict[str, Any]:
    first, _, rest = row.field.partition(".")
    return {first: {**row.send[first], rest: value}} if rest else {first: value}

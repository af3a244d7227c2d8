"""The gateway's tokens of a body are those of the worker's own way from it to a prompt."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.api.as_chat import as_chat
from headrace.api.dialect import find_dialect
from headrace.api.message_blocks import Messages
from headrace.api.message_blocks import chat_fields as messages_fields
from headrace.api.response_items import Responses
from headrace.api.response_items import chat_fields as responses_fields
from headrace.api.schemas import Chat, parse
from headrace.api.service import Service
from headrace.api.turns import chat_ids
from headrace.config import Settings
from headrace.errors import InvalidRequest
from headrace.gateway import tokenising
from headrace.gateway.tokenising import ModelTokens
from headrace.sources.card import ModelCard, read_card
from headrace.sources.files import ModelFiles
from headrace.sources.resolve import FAKE, resolve
from headrace.text.response_prompt import input_items
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer, load_tokenizer

# As Qwen's: it shows tools, calls, results and reasoning, and thinks if it is asked to.
NATIVE = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
<tool_call></tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for m in messages %}{% if not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


class Model:
    """Both ends' ways to the tokens of one model's prompts."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, gateway: ModelTokens) -> None:
        self.gateway = gateway
        template = ChatTemplate(card)
        options = Settings()
        self.dialect = find_dialect(options, card, template.facts, tokenizer)
        self._service = SimpleNamespace(
            settings=options, template=template, dialect=self.dialect, tokenizer=tokenizer
        )

    def worker(self, path: str, raw: dict[str, Any]) -> list[int]:
        """As `api.messages.create` and `api.responses.create` come to a prompt. Raises
        InvalidRequest."""
        if path == "/v1/messages":
            chat = as_chat(raw, messages_fields(parse(Messages, raw)[0]))
        elif path == "/v1/responses":
            body = parse(Responses, raw)[0]
            items = input_items(body.input)
            if not items:
                raise InvalidRequest("input is required", param="input")
            chat = as_chat(raw, responses_fields(body, items))
        else:
            chat = parse(Chat, raw)[0]
        return chat_ids(cast(Service, self._service), chat)


@lru_cache
def model(name: str) -> Model:
    files = FAKE if name == "fake" else resolve("", say=print)
    card = read_card(files)
    if name == "native":
        card = msgspec.structs.replace(card, chat_template=NATIVE)
    with _card(files, card):
        gateway = ModelTokens(files, 2**20)
    return Model(card, load_tokenizer(files, card), gateway)


@contextmanager
def _card(files: ModelFiles, card: ModelCard) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        text = card, load_tokenizer(files, card)
        patch.setattr(tokenising, "load_text", lambda files: text)
        yield


TEXT = st.sampled_from(
    ["", "hi", "What is\na mill?", " é水🐙", "<|im_start|>user", "<tool_call>", "</think>"]
)
NAME = st.sampled_from(["turn", "get_code", "no name!"])
SCHEMA = st.sampled_from(
    [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "object"}]
)
ARGUMENTS = st.sampled_from([{}, {"a": 1}, {"a": "水"}, {"a": [None, {"b": 1.5}]}])


def one_of(*kinds: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(*(st.fixed_dictionaries(kind) for kind in kinds))


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


BLOCK = one_of(
    {"type": st.just("text"), "text": TEXT},
    {"type": st.just("thinking"), "thinking": TEXT, "signature": st.just("")},
    {"type": st.just("tool_use"), "id": st.just("c1"), "name": NAME, "input": ARGUMENTS},
    {"type": st.just("tool_result"), "tool_use_id": st.just("c1"), "content": TEXT,
     "is_error": st.booleans()},
    {"type": st.just("image"), "source": st.just({})},
)  # fmt: skip
TURN = one_of(
    {
        "role": st.sampled_from(["user", "user", "assistant", "system", "wizard"]),
        "content": TEXT | st.lists(BLOCK, max_size=3),
    }
)
MESSAGES = st.builds(
    lambda turns, more: {"max_tokens": 5, "messages": turns, **more},
    st.lists(TURN, max_size=5),
    optional(
        system=TEXT | st.lists(one_of({"type": st.just("text"), "text": TEXT}), max_size=2),
        tools=st.lists(
            one_of({"name": NAME, "input_schema": SCHEMA, "description": TEXT}), max_size=2
        ),
        tool_choice=one_of({"type": st.sampled_from(["auto", "any", "none"])}),
        thinking=one_of({"type": st.sampled_from(["enabled", "disabled", "adaptive"])}),
        output_config=one_of({"effort": st.sampled_from(["low", "max"])}),
        chat_template_kwargs=optional(enable_thinking=st.booleans(), tools=st.none()),
    ),
)
PART = one_of(
    {"type": st.sampled_from(["input_text", "output_text", "refusal"]), "text": TEXT},
    {"type": st.just("input_image"), "image_url": st.just("x")},
)
ITEM = one_of(
    {
        "role": st.sampled_from(["user", "user", "assistant", "developer", "wizard"]),
        "content": TEXT | st.lists(PART, max_size=2),
    },
    {"type": st.just("function_call"), "call_id": st.just("c1"), "name": NAME,
     "arguments": ARGUMENTS.map(json.dumps) | TEXT},
    {"type": st.just("function_call_output"), "call_id": st.just("c1"), "output": TEXT},
    {"type": st.just("reasoning"), "content":
     st.lists(one_of({"type": st.just("reasoning_text"), "text": TEXT}), max_size=2)},
    {"type": st.just("item_reference"), "id": st.just("x")},
)  # fmt: skip
RESPONSES = st.builds(
    lambda given, more: {"input": given, **more},
    TEXT | st.lists(ITEM, max_size=5),
    optional(
        instructions=TEXT,
        tools=st.lists(
            one_of(
                {"type": st.sampled_from(["function", "function", "web_search"]), "name": NAME,
                 "parameters": SCHEMA, "description": TEXT}
            ),
            max_size=2,
        ),
        tool_choice=st.sampled_from(["auto", "none", "required"]),
        reasoning=one_of({"effort": st.sampled_from(["low", "none"])}),
        chat_template_kwargs=optional(enable_thinking=st.booleans(), messages=st.none()),
    ),
)  # fmt: skip
BODIES = st.tuples(st.just("/v1/messages"), MESSAGES) | st.tuples(
    st.just("/v1/responses"), RESPONSES
)
WEATHER = {"name": "turn", "input_schema": {"type": "object"}, "description": "Turns it."}
CALLED = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be short."}],
    "tools": [WEATHER],
    "thinking": {"type": "disabled"},
    "messages": [
        {"role": "user", "content": "Turn it."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "c1", "name": "turn", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "done"},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "assistant", "content": "It"},
    ],
}


@pytest.mark.parametrize("name", ["fake", "default", "native"])
@settings(max_examples=60, deadline=None)
@given(asked=BODIES)
@example(asked=("/v1/messages", CALLED))
def test_the_tokens_of_the_worker(name: str, asked: tuple[str, dict[str, Any]]) -> None:
    """What the worker would answer is tokenised, and alike; what it refuses it refuses anyway."""
    path, raw = asked
    ends = model(name)
    made = ends.gateway.read(path, json.dumps(raw).encode())
    try:
        ids = ends.worker(path, raw)
    except InvalidRequest:
        return
    assert isinstance(made, array), made
    assert made.tolist() == ids


def test_the_examples_reach_what_they_should() -> None:
    """So that the property is not one of refused bodies."""
    assert model("native").dialect.native
    assert not model("default").dialect.native
    ids = model("native").worker("/v1/messages", CALLED)
    text = model("native").gateway.pieces._tokenizer.decode(ids, skip_special=False)
    for part in ("Be short.", '"name": "turn"', "<think>\nHm.", "done<|im_end|>", "assistant\nIt"):
        assert part in text
    assert text.endswith("It")


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/responses", {"input": "hi", "previous_response_id": "r"}, "previous_response_id"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "'input_image' are not taken",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "type 'image' is not taken",
        ),
        ("/v1/messages", {"messages": []}, "length >= 1"),
        ("/v1/responses", {"input": 5}, "$.input"),
        ("/v1/responses", {"input": [{"content": "hi"}, {"type": ["x"]}]}, "input[1].type"),
        ("/v1/responses", {}, "empty"),
        ("/v1/chat/completions", {"messages": [], "chat_template": "x"}, "chat_template"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "$.prompt"),
    ],
)
def test_why_only_the_worker_can_tell(path: str, body: dict[str, Any], why: str) -> None:
    told = model("fake").gateway.read(path, json.dumps(body).encode())
    assert isinstance(told, str)
    assert why in told

"""Messages and prompts in all their shapes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.api.prepare import split_prompt
from headrace.errors import InvalidRequest
from headrace.text.turns import Message, effort_variables, normalise


def turns(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return normalise(msgspec.convert(list(messages), list[Message]))


CALL = {"id": "c1", "type": "function", "function": {"name": "get_code", "arguments": '{"a": 1}'}}


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turns({"role": "developer", "content": parts}) == [{"role": "system", "content": "a\nb"}]


def test_null_missing_and_empty_content_of_an_assistant_are_alike() -> None:
    user = {"role": "user", "content": "q"}
    result = {"role": "tool", "content": "42.7", "tool_call_id": "c1"}
    null = turns(user, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result)
    missing = turns(user, {"role": "assistant", "tool_calls": [CALL]}, result)
    assert null == missing
    assert null[1]["tool_calls"] == [CALL]
    assert turns({"role": "assistant", "content": ""})[0]["content"] == ""


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "wizard", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "q"}, {"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{}]}],
        [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}],
    ],
)
def test_messages_that_are_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        turns(*messages)
    assert caught.value.param == "messages"
    assert 0 < len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("prompt", "split"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "", "b"], ["a", "", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 258]], [[1], [2, 258]]),
    ],
)
def test_shapes_of_a_prompt(prompt: Any, split: list[Any]) -> None:
    assert split_prompt(prompt, 259) == split


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [-1],
        [[-1]],
        [259],
        [5279552648203111001],
        [1.5],
        [[1.5]],
        [True],
        [None],
        ["a", 1],
        ["a", [1]],
        [[1], "a"],
        [{}],
        ["a"] * 1025,
    ],
)
def test_prompts_that_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        split_prompt(prompt, 259)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("names", "effort", "variables"),
    [
        (["reasoning_effort", "enable_thinking"], "low", {"reasoning_effort": "low"}),
        (["enable_thinking"], "none", {"enable_thinking": False}),
        (["thinking"], "high", {"thinking": True}),
    ],
)
def test_effort(names: list[str], effort: str, variables: dict[str, Any]) -> None:
    assert effort_variables(effort, frozenset(names)) == variables


def test_effort_that_means_nothing_to_the_template() -> None:
    with pytest.raises(InvalidRequest) as caught:
        effort_variables("low", frozenset(["tools"]))
    assert caught.value.param == "reasoning_effort"

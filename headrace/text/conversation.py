"""A conversation as one template can show it: what it lacks is put into words of our own.

docs/tools.md has these words. They follow the form of Hermes and Qwen, which models that were
trained for no form of their own have read most often.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import InvalidRequest
from headrace.text.template_facts import TemplateFacts

TOOLS = """\
You may call functions to help with what the user asks. These are the functions:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between tags, one pair of tags a call:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""
DOCUMENTS = """\
Documents that the user gives:
<documents>
{documents}
</documents>"""

Turn = dict[str, Any]


class Asked(msgspec.Struct, frozen=True):
    """A conversation, and what a template is to make of it."""

    turns: list[Turn]
    tools: list[dict[str, Any]] = []  # those that are shown
    documents: list[dict[str, Any]] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = {}


def asked_of(turns: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> Asked:
    """`given`: tools, documents and flags by their names; all else are the template's variables."""
    names = ("tools", "documents", "add_generation_prompt", "continue_final_message")
    known = {name: given[name] for name in names if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in names}
    return Asked([dict(turn) for turn in turns], **known, kwargs=rest)


def fitted(asked: Asked, facts: TemplateFacts, native: bool) -> list[Turn]:
    """The turns as a template with these facts can show them; native: it shows tools and calls.

    Raises InvalidRequest.
    """
    turns = asked.turns
    if not native:
        turns = without_calls(turns)
        turns = with_tools(turns, asked.tools) if asked.tools else turns
    if asked.documents and not facts.takes_documents:
        turns = with_documents(turns, asked.documents)
    if not facts.shows_system:
        turns = without_system(turns)
    return in_parts(turns) if facts.wants_parts else turns


def with_system(turns: Sequence[Turn], text: str) -> list[Turn]:
    """`text` at the end of the system message, or as one."""
    if turns and turns[0]["role"] == "system":
        said = turns[0].get("content") or ""
        return [{**turns[0], "content": f"{said}\n\n{text}" if said else text}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def with_tools(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The tools in the system message."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return with_system(turns, TOOLS.format(tools=lines))


def with_documents(turns: Sequence[Turn], documents: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The documents in the system message, numbered from 1."""
    shown = "\n".join(
        f"[{at}] {json.dumps(document, ensure_ascii=False)}"
        for at, document in enumerate(documents, 1)
    )
    return with_system(turns, DOCUMENTS.format(documents=shown))


def without_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Calls of earlier turns as text, and their results as a user's turn."""
    out: list[Turn] = []
    for turn in turns:
        if turn["role"] == "tool":
            text = f"<tool_response>\n{turn.get('content') or ''}\n</tool_response>"
            if out and out[-1].get("results"):
                out[-1]["content"] += "\n" + text
            else:
                out.append({"role": "user", "content": text, "results": True})
        elif turn.get("tool_calls"):
            texts = [turn["content"]] if turn.get("content") else []
            texts += [_call_text(call) for call in turn["tool_calls"]]
            rest = {key: value for key, value in turn.items() if key != "tool_calls"}
            out.append({**rest, "content": "\n".join(texts)})
        else:
            out.append(turn)
    for turn in out:
        turn.pop("results", None)
    return out


def without_system(turns: Sequence[Turn]) -> list[Turn]:
    """System messages at the start in front of the first user message, by an empty line.

    Raises InvalidRequest if there is none, or if a system message comes later.
    """
    count = next((at for at, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    if any(turn["role"] == "system" for turn in turns[count:]):
        raise InvalidRequest(
            "this model's chat template takes no system message after the first turns",
            param="messages",
        )
    if not count:
        return list(turns)
    if count == len(turns) or turns[count]["role"] != "user":
        raise InvalidRequest(
            "this model's chat template has no system role, and there is no user message "
            "directly behind it to put its text into",
            param="messages",
        )
    texts = [str(turn.get("content") or "") for turn in turns[: count + 1]]
    merged = {**turns[count], "content": "\n\n".join(text for text in texts if text)}
    return [merged, *turns[count + 1 :]]


def in_parts(turns: Sequence[Turn]) -> list[Turn]:
    """Content as a list of text parts."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn.get("content"), str)
        else turn
        for turn in turns
    ]


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest("tool_calls: function.name is missing", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else shown as the text that it is
            arguments = json.loads(arguments or "{}")
    shown = {"name": function["name"], "arguments": arguments}
    return f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"

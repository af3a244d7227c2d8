"""What goes into the model, shown to the moderation hooks before anything is computed for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from headrace.api.hook_calls import heard
from headrace.api.schemas import Chat, Tokenize
from headrace.api.service import Service
from headrace.errors import ContentBlocked, RequestFailed
from headrace.hooks.contract import Action

HEADER = "x-headrace-moderation"
MAX_LABELS, MAX_LABEL_CHARS = 16, 64
SAID = ("text", "refusal")  # of a part of a message's content


async def moderated(service: Service, texts: Sequence[str]) -> dict[str, float]:
    """Labels of the annotating hooks. Raises ContentBlocked, HookUnavailable, RequestFailed."""
    labels: dict[str, float] = {}
    shown = [text for text in texts if text]
    for hook in service.hooks.moderation:
        verdict = await heard(service, "moderation", hook.judge(shown))
        if verdict.action not in get_args(Action):
            raise RequestFailed("a moderation hook said what is no verdict")
        service.metrics.count_hook("moderation", verdict.action)
        if verdict.action == "block":
            raise ContentBlocked(verdict.reason or "the request was refused by moderation")
        if verdict.action == "annotate":
            labels |= verdict.labels
    return labels


def texts_of(request: Chat | Tokenize) -> list[str]:
    """All that a client may bring into the prompt of a chat, each text once. Names of members are
    texts too: a model reads those of tools and documents."""
    texts: list[str] = []
    for message in request.messages or []:
        if isinstance(message.content, list):
            texts += _strings([part.get(key) for part in message.content for key in SAID])
        else:
            texts += _strings(message.content)
        texts += _strings([message.name, message.reasoning, message.reasoning_content])
        texts += _strings([message.tool_call_id, message.tool_calls])
    for name in ("tools", "documents", "chat_template_kwargs", "chat_template"):
        texts += _strings(msgspec.to_builtins(getattr(request, name, None)))
    return list(dict.fromkeys(texts))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for member in value:
            yield from _strings(member)


def labelled(labels: Mapping[str, float]) -> dict[str, str]:
    """The header that names the labels of a prompt that went on."""
    if not labels:
        return {}
    shown = list(labels.items())[:MAX_LABELS]
    return {HEADER: ", ".join(f"{_plain(name)}={score:.4g}" for name, score in shown)}


def _plain(name: str) -> str:
    """A label as a header may hold it."""
    short = name[:MAX_LABEL_CHARS]
    return "".join(c if c.isascii() and c.isprintable() and c not in ",=" else "_" for c in short)

"""Chat messages to one prompt, by the model's own Jinja template.

The template comes with the model, so it runs in Jinja's immutable sandbox: no Python internals, no
change of its inputs, with limits on its time and its output (`template_guard`). The environment is
the one that templates are written for: transformers'.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from headrace.errors import InvalidRequest, ModelError
from headrace.sources.card import ModelCard
from headrace.text import conversation
from headrace.text.conversation import Asked
from headrace.text.template_facts import TemplateFacts, find_facts
from headrace.text.template_guard import GuardedEnvironment

_MAX_REASON = 300  # characters of a template's complaint that a client is shown


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote; it prints as is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations. Raises ModelError at once if the model's template does not parse."""

    def __init__(self, card: ModelCard, whose: str = "the model's") -> None:
        self._whose = whose
        self._variables = dict(card.special_tokens)
        self._template: jinja2.Template | None = None
        self.facts = TemplateFacts()
        self.slowest_s = 0.0  # of all renders so far
        self._environment = environment = _environment()
        if card.chat_template is not None:
            try:
                self._template = environment.from_string(card.chat_template)
                names = meta.find_undeclared_variables(environment.parse(card.chat_template))
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"{whose} chat template does not parse: line {error.lineno}: {error.message}"
                ) from None
            self.facts = find_facts(card.chat_template, frozenset(names), self._probe)

    def prompt(self, asked: Asked, native: bool | None = None) -> str:
        """As `render`, with what the template lacks said in words: see `conversation`.

        native: whether the template shows tools and calls; None: as it looks.
        """
        facts = self.facts
        native = facts.takes_tools if native is None else native
        return self.render(
            conversation.fitted(asked, facts, native),
            tools=asked.tools if native else None,
            documents=asked.documents if facts.takes_documents else None,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            **asked.kwargs,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt. It holds the template's own BOS, if any: encode it without `add_special`.

        messages: dicts with a role and, as a rule, string content; null or missing content is "".
        continue_final_message: end inside the last message, for the model to write on; excludes
            add_generation_prompt.
        kwargs: further variables for the template, such as enable_thinking.

        Raises InvalidRequest (param "messages") for what the template refuses or cannot render,
        and with the parameter's name for arguments that contradict each other.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions with a finished prompt",
                param="messages",
            )
        self._check(messages, add_generation_prompt, continue_final_message, kwargs)
        turns = [_normal(message) for message in messages]
        mark = ""
        if continue_final_message:
            mark = f"<{secrets.token_hex(16)}>"  # random: it occurs nowhere else
            turns[-1] = {**turns[-1], "content": turns[-1]["content"] + mark}
        text = self._run(
            {
                **self._variables,
                **kwargs,
                "messages": turns,
                "tools": list(tools) if tools else None,
                "documents": list(documents) if documents else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        if not continue_final_message:
            return text
        if mark not in text:
            raise InvalidRequest(
                "the chat template does not show the last message, so it cannot be continued",
                param="continue_final_message",
            )
        return text[: text.rindex(mark)]

    def _check(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
    ) -> None:
        reserved = {"messages", "raise_exception", "strftime_now", *self._variables}
        if clash := sorted(reserved & set(kwargs)):
            raise InvalidRequest(
                f"{clash[0]} cannot be set for the chat template", param="chat_template_kwargs"
            )
        if not continue_final_message:
            return
        if add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        if not messages or not isinstance(messages[-1].get("content", ""), str | None):
            raise InvalidRequest(
                "continue_final_message needs a last message with text content",
                param="continue_final_message",
            )

    def _probe(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.render(messages)
        except InvalidRequest:
            return ""

    def _run(self, variables: dict[str, Any]) -> str:
        assert self._template is not None, "render checked it"
        begun_s = time.monotonic()
        try:
            return self._environment.render_within(self._template, variables)
        except _Refused as error:
            reason = str(error)
        except jinja2.TemplateError as error:
            reason = error.message or type(error).__name__
        except Exception as error:  # whatever the expressions of a stranger's template raise
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
        reason = " ".join(reason.split())[:_MAX_REASON]
        raise InvalidRequest(
            f"{self._whose} chat template cannot render these messages: {reason}", param="messages"
        )


def _normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """What templates are written for: text content, no nulls, tool arguments as objects."""
    turn = {key: value for key, value in message.items() if value is not None}
    turn.setdefault("content", "")
    if calls := turn.get("tool_calls"):
        turn["tool_calls"] = [_with_object_arguments(call) for call in calls]
    else:
        turn.pop("tool_calls", None)  # templates ask whether the key is there
    return turn


def _with_object_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI sends arguments as JSON text; templates print them as an object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)  # shown as the text that it is
    except RecursionError:
        raise InvalidRequest("tool_calls: arguments nest too deeply", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _environment() -> GuardedEnvironment:
    environment = GuardedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.seal()
    del environment.globals["lipsum"]  # prints text of any length; no chat template wants it
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes <, >, & and ' for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

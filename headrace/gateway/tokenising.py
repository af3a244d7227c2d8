"""Prompts to token ids in the gateway: in threads, by the code that a headrace worker would use.

A prompt that cannot be tokenised here goes on as it came: the worker knows what is wrong with it.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.errors import ConfigError, HeadraceError
from headrace.foreign_json import Malformed, read_json
from headrace.gateway.beliefs import card_of
from headrace.gateway.prompt import GENERATES, Prompt
from headrace.gateway.worker import Worker
from headrace.sources.files import ModelFiles
from headrace.sources.resolve import FAKE, resolve
from headrace.text import message_prompt, response_prompt
from headrace.text.calls.forms import form_of
from headrace.text.identity import prompt_identity
from headrace.text.message_prompt import Blocks, OutputConfig, Thinking, ToolChoice, Turn
from headrace.text.pieces import PieceCache
from headrace.text.response_prompt import Input, ReasoningConfig, input_items
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import load_text
from headrace.text.tool_list import Tool, shown_tool
from headrace.text.turns import Message, asked_by

log = logging.getLogger("headrace.gateway")

MAX_WAITING = 64  # prompts; more go on untokenised
MOST_SENT_BYTES = 4 * 2**20  # of a body with its ids; a longer one goes without
_FIELD = b'"prompt_ids"'
MOST_REASON = 200  # characters
EMPTY = "the prompt is empty"
NO_TOKENIZER = "no tokenizer is loaded for the model"


class _Chat(msgspec.Struct):
    """What of a chat body becomes its prompt."""

    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: Any = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None


class _Completion(msgspec.Struct):
    prompt: str
    add_special_tokens: bool | None = None


class _Messages(msgspec.Struct):
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Responses(msgspec.Struct):
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Untold(Exception):
    """Only the worker can tell the prompt; says why."""


def _chat_of(path: str, body: bytes) -> _Chat:
    """A body of any conversation, as chat. Raises _Untold, Malformed, ValidationError,
    InvalidRequest.
    """
    if path == "/v1/messages":
        fields = message_prompt.prompt_fields(read_json(body, _Messages))
    elif path == "/v1/responses":
        said = read_json(body, _Responses)
        if said.previous_response_id is not None:
            raise _Untold("previous_response_id: the worker has what was said before")
        fields = response_prompt.prompt_fields(said, input_items(said.input))
    else:
        chat = read_json(body, _Chat)
        if chat.chat_template is not None:
            raise _Untold("chat_template: the request brings its own")
        return chat
    return msgspec.convert({k: v for k, v in fields.items() if v is not None}, _Chat)


class ModelTokens:
    """One model's template and tokenizer. Safe from several threads."""

    def __init__(self, files: ModelFiles, cache_bytes: int) -> None:
        """Raises ModelError for files that cannot be read."""
        card, tokenizer = load_text(files)
        self.pieces = PieceCache(tokenizer, cache_bytes)
        self._template = ChatTemplate(card)
        self._native = self._template.facts.takes_tools and bool(form_of(card.chat_template))
        self.identity = prompt_identity(tokenizer, card, self._native)

    def read(self, path: str, body: bytes) -> array[int] | str:
        """The tokens of a body's prompt; or why only the worker can tell them."""
        try:
            if path == "/v1/completions":
                said = read_json(body, _Completion)
                special = said.add_special_tokens is not False
                return self.pieces.encode(said.prompt, add_special=special) or EMPTY
            chat = _chat_of(path, body)
            if not chat.messages:
                return EMPTY
            tools = [] if chat.tool_choice == "none" else list(map(shown_tool, chat.tools or ()))
            asked = asked_by(chat, tools, self._template.facts.names)
            text = self._template.prompt(asked, self._native)
            return self.pieces.encode(text, add_special=bool(chat.add_special_tokens)) or EMPTY
        except _Untold as untold:
            return str(untold)
        except HeadraceError as error:
            return error.message[:MOST_REASON]
        except (Malformed, msgspec.ValidationError) as error:
            return f"the body {error}"[:MOST_REASON]


class Tokenising:
    """The models whose prompts are tokenised here, and the threads that do it."""

    def __init__(
        self, models: Mapping[str, ModelTokens], threads: int, count: Callable[[str], None]
    ) -> None:
        """count: is told what became of each prompt: ids, worker (it has to), busy."""
        self.models = models
        self._count = count
        self._waiting = 0
        self._threads = ThreadPoolExecutor(threads, "tokenise") if models else None

    def start(self, path: str, prompt: Prompt) -> asyncio.Future[array[int] | str] | None:
        """Tokenise the prompt. None: it goes on as it is, at once."""
        model = self.models.get(prompt.model)
        if prompt.ids is not None:
            return None
        if model is None or self._threads is None or path not in GENERATES:
            prompt.untokenised = NO_TOKENIZER
            return None
        if _FIELD in prompt.body:
            prompt.untokenised = "prompt_ids: the request brings its own"
            return None
        if self._waiting >= MAX_WAITING:
            prompt.untokenised = f"{MAX_WAITING} prompts are being tokenised"
            self._count("busy")
            return None
        self._waiting += 1
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._threads, model.read, path, prompt.body)
        done.add_done_callback(self._done)
        return done

    def _done(self, done: asyncio.Future[array[int] | str]) -> None:
        self._waiting -= 1
        if not done.cancelled():
            worker = done.exception() is not None or isinstance(done.result(), str)
            self._count("worker" if worker else "ids")

    def take(self, prompt: Prompt, done: asyncio.Future[array[int] | str]) -> None:
        """What came of `start`, into the prompt."""
        error = done.exception()
        if error is not None:
            log.error("a prompt could not be tokenised", exc_info=error)
            prompt.untokenised = "an error, which is in the log"
        elif isinstance(ids := done.result(), str):
            prompt.untokenised = ids
        else:
            prompt.ids, prompt.prompt_tokens = ids, len(ids)
            prompt.tokenizer = self.models[prompt.model].identity

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)


def body_for(prompt: Prompt, worker: Worker) -> bytes:
    """The body for that worker: ids go to one that says that it would make the same."""
    if prompt.ids is None or not prompt.tokenizer:
        return prompt.body
    if card_of(worker, prompt.model).tokenizer != prompt.tokenizer:
        return prompt.body
    if not prompt.body_with_ids:
        said = {"tokenizer": prompt.tokenizer, "ids": prompt.ids.tolist()}
        field = b",%b:%b}" % (_FIELD, msgspec.json.encode(said))
        whole = prompt.body[: prompt.body.rindex(b"}")] + field
        prompt.body_with_ids = whole if len(whole) <= MOST_SENT_BYTES else prompt.body
    return prompt.body_with_ids


def load_models(
    named: Sequence[str], cache_bytes: int, say: Callable[[str], None]
) -> dict[str, ModelTokens]:
    """NAME=SOURCE each. Raises ConfigError, or ModelError for a source that cannot be read."""
    models: dict[str, ModelTokens] = {}
    for entry in named:
        name, equals, source = entry.partition("=")
        if not (name and equals):
            raise ConfigError(f"tokenizer = {entry!r}: write NAME=SOURCE", param="tokenizer")
        files = FAKE if source == "fake" else resolve(source, say=say, weights=False)
        made = models[name] = ModelTokens(files, cache_bytes // len(named))
        log.info("prompts of %s are tokenised here; pieces: %s", name, made.pieces.cuts)
    return models

"""Prompts to token ids in the gateway: in threads, by the code that a headrace worker would use.

A prompt that cannot be tokenised here goes on as it came: the worker knows what is wrong with it.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from headrace.errors import ConfigError, HeadraceError
from headrace.gateway.beliefs import card_of
from headrace.gateway.prompt import Prompt
from headrace.gateway.worker import Worker
from headrace.sources.card import read_card
from headrace.sources.files import ModelFiles
from headrace.sources.resolve import FAKE, resolve
from headrace.text.calls.forms import form_of
from headrace.text.identity import prompt_identity
from headrace.text.pieces import PieceCache
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import load_tokenizer
from headrace.text.tool_list import Tool, shown_tool
from headrace.text.turns import Message, asked_by

log = logging.getLogger("headrace.gateway")

MAX_WAITING = 64  # prompts; more go on untokenised
MOST_SENT_BYTES = 4 * 2**20  # of a body with its ids; a longer one goes without
_FIELD = b'"prompt_ids"'


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


class ModelTokens:
    """One model's template and tokenizer. Safe from several threads."""

    def __init__(self, files: ModelFiles, cache_bytes: int) -> None:
        """Raises ModelError for files that cannot be read."""
        card = read_card(files)
        tokenizer = load_tokenizer(files, card)
        self.pieces = PieceCache(tokenizer, cache_bytes)
        self._template = ChatTemplate(card)
        self._native = self._template.facts.takes_tools and bool(form_of(card.chat_template))
        self.identity = prompt_identity(tokenizer, card, self._native)

    def ids(self, path: str, body: bytes) -> array[int] | None:
        """The prompt of a chat or completion body; None: only the worker can tell."""
        try:
            if path == "/v1/completions":
                said = msgspec.json.decode(body, type=_Completion)
                special = said.add_special_tokens is not False
                return self.pieces.encode(said.prompt, add_special=special) or None
            chat = msgspec.json.decode(body, type=_Chat)
            if chat.chat_template is not None or not chat.messages:
                return None
            tools = [] if chat.tool_choice == "none" else list(map(shown_tool, chat.tools or ()))
            asked = asked_by(chat, tools, self._template.facts.names)
            text = self._template.prompt(asked, self._native)
            return self.pieces.encode(text, add_special=bool(chat.add_special_tokens)) or None
        except (msgspec.DecodeError, RecursionError, HeadraceError):
            return None


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

    def start(self, path: str, prompt: Prompt) -> asyncio.Future[array[int] | None] | None:
        """Tokenise the prompt. None: it goes on as it is, at once."""
        model = self.models.get(prompt.model)
        if model is None or self._threads is None or prompt.ids is not None:
            return None
        if path not in ("/v1/chat/completions", "/v1/completions") or _FIELD in prompt.body:
            return None
        if self._waiting >= MAX_WAITING:
            self._count("busy")
            return None
        self._waiting += 1
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._threads, model.ids, path, prompt.body)
        done.add_done_callback(self._done)
        return done

    def _done(self, done: asyncio.Future[array[int] | None]) -> None:
        self._waiting -= 1
        if not done.cancelled():
            self._count("worker" if done.exception() or done.result() is None else "ids")

    def take(self, prompt: Prompt, done: asyncio.Future[array[int] | None]) -> None:
        """What came of `start`, into the prompt."""
        error = done.exception()
        if error is not None:
            log.error("a prompt could not be tokenised", exc_info=error)
        elif (ids := done.result()) is not None:
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

"""Compiler: the engine's grammars. Compiles in threads, off the step path; keeps the last few."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from headrace.errors import InvalidRequest
from headrace.grammar.limits import CACHED, LEXER_STATES, MAX_TEXT
from headrace.grammar.matcher import Matcher, fill, why
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages import Grammar

COMPILE_THREADS = 2
FILL_THREADS = 8


class Compiler:
    """See `engine.protocol.Grammars`. llguidance compiles and fills without the GIL.

    `load` reads the tokenizer; it runs in a thread of the pool, before the first grammar.
    """

    def __init__(self, load: Callable[[], Vocabulary], end_ids: Sequence[int]) -> None:
        self.end_ids = list(end_ids)
        self._load = load
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        threads = max(1, min(FILL_THREADS, (os.cpu_count() or 1) // 2))
        self._fillers = LLExecutor(num_threads=threads)
        self._cache: OrderedDict[tuple[str, str], Future[Matcher]] = OrderedDict()

    def warm(self) -> None:
        """Read the tokenizer now, in the background."""
        self._pool.submit(self._ready)

    def compile(self, grammar: Grammar) -> Future[Matcher]:
        """A matcher at the start of `grammar`; the future raises InvalidRequest."""
        key = (grammar.kind, grammar.text)
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            return known
        future = self._pool.submit(self._compile, grammar)
        self._cache[key] = future
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)
        return future

    def fill(self, matchers: Sequence[Matcher], bits: npt.NDArray[np.int32]) -> None:
        """See `matcher.fill`."""
        fill(self._fillers, matchers, bits)

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ready(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load().build()
            return self._tokenizer

    def _compile(self, grammar: Grammar) -> Matcher:
        tokenizer = self._ready()
        matcher = Matcher(compiled(tokenizer, grammar))
        # The first mask is the dearest; clones share what it found out.
        self.fill([matcher], np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32))
        matcher.check()
        return matcher


def compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Raises InvalidRequest for whatever llguidance refuses, and for what nothing can match."""
    if len(grammar.text) > MAX_TEXT:
        raise InvalidRequest(f"the grammar is over {MAX_TEXT} characters")
    try:
        source = source_of(grammar)
    except ValueError as error:
        raise InvalidRequest(f"the grammar cannot be read: {error}") from None
    limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
    inner = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if inner.is_error():
        raise InvalidRequest(why(inner))
    return inner


def source_of(grammar: Grammar) -> str:
    """llguidance's own form."""
    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)

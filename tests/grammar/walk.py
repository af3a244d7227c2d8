"""Random outputs of a grammar: every token that it allows may come, so more than a model would say.

The vocabulary is the fake model's, 256 bytes and three special tokens, plus some longer tokens.
"""

from __future__ import annotations

import functools
import json
from decimal import Decimal, localcontext
from random import Random
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLTokenizer

from headrace.errors import InvalidRequest
from headrace.grammar.asked import json_grammar
from headrace.grammar.checker import verdict
from headrace.grammar.compile import compiled
from headrace.grammar.matcher import Matcher
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages import Grammar

END = 258
LONGER = [
    '{"',
    '":',
    '",',
    '": "',
    '"}',
    "}}",
    "]]",
    "true",
    "null",
    "  ",
    "\n\n",
    "12",
    "é",
    "abc",
]
TOKENS = [bytes([i]) for i in range(256)]
TOKENS += [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
TOKENS += [text.encode() for text in LONGER]
CLOSERS = [i for i, token in enumerate(TOKENS) if token in (b'"', b"]", b"}", b'"}', b"}}", b"]]")]
WORDS = -(-len(TOKENS) // 32)
HUGE = 500


@functools.cache
def tokenizer() -> LLTokenizer:
    """Bytes alone: what is forced comes byte by byte."""
    return Vocabulary(
        TOKENS, frozenset({256, 257, END}), [END], len(TOKENS), lambda text: list(text.encode())
    ).build()


def matcher(grammar: Grammar) -> Matcher:
    """At the start of `grammar`. Raises InvalidRequest."""
    return Matcher(compiled(tokenizer(), grammar))


def allowed(at: Matcher) -> list[int]:
    """The tokens of its mask."""
    bits = np.zeros((1, WORDS), np.int32)
    at._inner.unsafe_compute_mask_ptr(bits.ctypes.data, WORDS * 4)
    at.check()
    flat = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(TOKENS)]
    found: list[int] = np.flatnonzero(flat).tolist()
    return found


def agrees(at: Matcher, tokens: list[int], random: Random) -> None:
    """What is forced, and what is allowed without a mask, is what the mask says."""
    forced = at.forced()
    if forced:
        assert tokens == forced[:1], "a mask beside a forced token"
        return
    for token in {*random.choices(tokens, k=3), *random.choices(range(len(TOKENS)), k=5)}:
        assert at.allows(token) == (token in tokens), f"{TOKENS[token]!r}: {token in tokens}"


def walk(start: Matcher, random: Random, most: int = 400, eager: int = 40) -> bytes | None:
    """One output, or None if it did not come to its end within `most` tokens.

    After `eager` tokens it closes whatever it can.
    """
    at, out = start.clone(), bytearray()
    for n in range(most):
        if at.ended:
            return bytes(out)
        tokens = allowed(at)
        assert tokens, f"a dead end after {bytes(out)!r}"
        assert (END in tokens) == at.accepts, "the end is allowed exactly where it may come"
        assert 256 not in tokens, "a special token is no text"
        assert 257 not in tokens, "a special token is no text"
        agrees(at, tokens, random)
        if END in tokens and (n >= eager or random.random() < 0.3 or len(tokens) == 1):
            return bytes(out)
        closers = [t for t in tokens if t in CLOSERS]
        late = n >= eager and closers and random.random() < 0.9
        token = random.choice(closers if late else [t for t in tokens if t != END])
        at.advance(token)
        out += TOKENS[token]
    return None


def validate(schema: Any, out: bytes) -> Any:
    """The value of `out`, which must match `schema`, formats and all."""
    value = json.loads(out, parse_float=_exact)
    with localcontext(prec=4 * HUGE):
        jsonschema.validate(
            value,
            json.loads(json.dumps(schema), parse_float=Decimal),
            cls=jsonschema.Draft202012Validator,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
    return value


def _exact(text: str) -> Decimal:
    """0.3 is a multiple of 0.1. An exponent is legal JSON at any length: 1e999999 is 1e500 here."""
    digits, _, exponent = text.lower().partition("e")
    return Decimal(digits).scaleb(max(-HUGE, min(HUGE, int(exponent or 0))))


def outputs(
    schema: Any, walks: int, seed: int = 0, most: int = 400, eager: int = 40, **options: Any
) -> list[bytes]:
    """Outputs that came to their end, each of which validates. Raises InvalidRequest."""
    start = matcher(json_grammar(schema, "schema", **options))
    found = [walk(start, Random(f"{seed}/{i}"), most, eager) for i in range(walks)]
    done = [out for out in found if out is not None]
    for out in done:
        validate(schema, out)
    return done


def refusal(schema: Any) -> str | None:
    """Why the schema is refused; None if it is not."""
    try:
        return verdict(tokenizer(), json_grammar(schema, "schema")) or None
    except InvalidRequest as error:
        return error.message

"""The process that compiles a stranger's grammar first. It may take too long, or too much memory,
or fall over: then it is killed, and nobody else notices. See `check.Checker`.

stdin: the parent's process id and the names of special tokens as one line of JSON, then a Grammar a
line. stdout: a line each, the error as a JSON string, "" if there is none.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from llguidance import LLTokenizer

from headrace.children import die_with_parent
from headrace.errors import HeadraceError
from headrace.grammar.compile import compiled
from headrace.grammar.limits import CHECK_BYTES
from headrace.grammar.matcher import Matcher
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages import Grammar

BYTES = 256


def byte_tokenizer(special: Sequence[str]) -> LLTokenizer:
    """A token a byte, an end token and the special ones: grammars do not depend on more."""
    names = ["<|end|>", *dict.fromkeys(name for name in special if name != "<|end|>")]
    tokens = [bytes([i]) for i in range(BYTES)] + [name.encode() for name in names]
    ids = range(BYTES, len(tokens))
    return Vocabulary(
        tokens, frozenset(ids), [BYTES], len(tokens), lambda text: list(text.encode())
    ).build()


def verdict(tokenizer: LLTokenizer, grammar: Grammar) -> str:
    """What is wrong with it; "" if it compiles and its first mask can be made."""
    words = -(-tokenizer.vocab_size // 32)
    bits = np.zeros(words, np.int32)
    try:
        inner = compiled(tokenizer, grammar)
        inner.unsafe_compute_mask_ptr(bits.ctypes.data, words * 4)
        Matcher(inner).check()
    except HeadraceError as error:
        return error.message or "it cannot be compiled"
    return "" if bits.any() else "nothing can match it"


def main() -> None:
    """Until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (CHECK_BYTES, CHECK_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = sys.stdin.buffer
    parent, special = msgspec.json.decode(lines.readline(), type=tuple[int, list[str]])
    die_with_parent(signal.SIGKILL, parent)
    tokenizer = byte_tokenizer(special)
    decode = msgspec.json.Decoder(Grammar).decode
    for line in lines:
        sys.stdout.buffer.write(msgspec.json.encode(verdict(tokenizer, decode(line))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

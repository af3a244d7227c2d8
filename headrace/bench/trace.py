"""Traces of requests in Mooncake's form (FAST'25): a JSON object a line, gzipped or not.

    {"timestamp": 40, "input_length": 1100, "output_length": 30, "hash_ids": [0, 7, 8]}

`timestamp` in ms from the start; a hash id stands for 512 tokens of the prompt, equal ids for equal
tokens behind an equal past; the last block may be cut short. No text: whoever replays it makes one.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.errors import ConfigError

BLOCK_TOKENS = 512  # of the form itself


class TraceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Lengths in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    def blocks(self, block_tokens: int) -> Iterator[tuple[int, int]]:
        """(hash id, tokens of it) in order: `input_length` tokens in all."""
        left = self.input_length
        for block in self.hash_ids:
            yield block, min(block_tokens, left)
            left -= min(block_tokens, left)


_LINE = msgspec.json.Decoder(TraceLine)


def read_trace(file: str) -> Iterator[TraceLine]:
    """The lines of `file`, one at a time. Raises ConfigError naming the line that is wrong."""
    path = Path(file)
    opened = gzip.open if path.suffix == ".gz" else open
    number, last = 0, -math.inf
    try:
        with opened(path, "rb") as raws:
            for raw in raws:
                number += 1
                line = _LINE.decode(raw)
                enough = len(line.hash_ids) * BLOCK_TOKENS >= line.input_length > 0
                if not enough or line.output_length < 0 or not last <= line.timestamp < math.inf:
                    raise ValueError("lengths, hash ids and rising timestamps do not fit together")
                last = line.timestamp
                yield line
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}", param="trace") from None
    except (EOFError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file}, line {number}: {error}", param="trace") from None


def replayed(file: str, block_tokens: int) -> Iterator[TraceLine]:
    """As `read_trace`, lengths times `block_tokens` / 512; an answer has at least one token."""
    for line in read_trace(file):
        yield msgspec.structs.replace(
            line,
            input_length=max(1, line.input_length * block_tokens // BLOCK_TOKENS),
            output_length=max(1, line.output_length * block_tokens // BLOCK_TOKENS),
        )

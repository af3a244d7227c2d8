"""A scoring hook for tests, found by its dotted path."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from headrace.errors import HookUnavailable
from headrace.hooks.contract import Asked


def worth(asked: str, answer: str) -> float:
    """Any number that depends on both."""
    return float(zlib.crc32(f"{asked}|{answer}".encode()) % 1000)


class Scorer:
    """Says `worth`; of an unlucky prompt, nothing."""

    def __init__(self, text: str) -> None:
        pass

    async def score(self, asked: Asked, answers: Sequence[str]) -> list[float]:
        """See `headrace.hooks.contract.Scorer`."""
        prompt = asked.prompt or str(asked.messages[-1]["content"])
        if "unlucky" in prompt:
            raise HookUnavailable("not today")
        return [worth(prompt, answer) for answer in answers]

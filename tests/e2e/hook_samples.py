"""A scoring hook for tests, found by its dotted path."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from headrace.errors import HookUnavailable
from headrace.hooks.contract import Asked, Verdict


def worth(asked: str, answer: str) -> float:
    """Any number that depends on both."""
    return float(zlib.crc32(f"{asked}|{answer}".encode()) % 1000)


class Scorer:
    """Says `worth`; of some prompts nothing, or nonsense."""

    def __init__(self, text: str) -> None:
        pass

    async def score(self, asked: Asked, answers: Sequence[str]) -> list[float]:
        """See `headrace.hooks.contract.Scorer`."""
        prompt = asked.prompt or str(asked.messages[-1]["content"])
        if "lost" in prompt:
            await asyncio.Event().wait()
        if "no number" in prompt:
            return [float("nan")] * len(answers)
        if "too few" in prompt:
            return [1.0]
        if "broken" in prompt:
            raise ZeroDivisionError("its inside")
        if "unlucky" in prompt:
            raise HookUnavailable("not today")
        return [worth(prompt, answer) for answer in answers]


class Moderation:
    """Allows; of some prompts it says nothing, or nonsense."""

    def __init__(self, text: str) -> None:
        pass

    async def judge(self, texts: Sequence[str]) -> Verdict:
        """See `headrace.hooks.contract.Moderation`."""
        text = " ".join(texts)
        if "misplaced" in text:
            await asyncio.Event().wait()
        if "confused" in text:
            return Verdict("perhaps")  # type: ignore[arg-type]
        if "shattered" in text:
            raise ZeroDivisionError("its inside")
        return Verdict()

"""Moderation by a service that speaks OpenAI's /v1/moderations: `moderation=http:URL`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from headrace.errors import HookUnavailable
from headrace.hooks.contract import Verdict
from headrace.hooks.remote import Remote, choice

log = logging.getLogger("headrace.hooks")


class HttpModeration:
    """POSTs `{"input": [texts]}` and reads `{"results": [{"flagged", "category_scores"}]}`.

    Options behind `#`: flagged = block or annotate; fail = closed (503 while the service cannot be
    reached) or open (the request goes on); timeout_s; key_env.
    """

    def __init__(self, text: str) -> None:
        self._remote = Remote(text, {"flagged", "fail"})
        self._flagged = choice(self._remote.options, "flagged", "block", "annotate")
        self._open = choice(self._remote.options, "fail", "closed", "open") == "open"

    def close(self) -> None:
        """See `Hooks.close`."""
        self._remote.close()

    async def judge(self, texts: Sequence[str]) -> Verdict:
        """See `Moderation`."""
        if not texts:
            return Verdict()
        try:
            labels = _flags(await self._remote.ask({"input": list(texts)}), self._remote.name)
        except HookUnavailable as error:
            if not self._open:
                raise
            log.warning("moderation fails open: %s", error.message)
            return Verdict()
        if labels is None:
            return Verdict()
        if self._flagged == "block":
            names = ", ".join(sorted(labels)) or "flagged"
            return Verdict("block", f"the request was refused by moderation: {names}", labels)
        return Verdict("annotate", labels=labels or {"flagged": 1.0})


def _flags(answer: Any, name: str) -> dict[str, float] | None:
    """Category -> highest score, of the categories that are flagged; None: nothing is.

    Raises HookUnavailable for an answer of another shape.
    """
    try:
        flagged = [result for result in answer["results"] if result["flagged"]]
        labels: dict[str, float] = {}
        for result in flagged:
            scores = result.get("category_scores") or {}
            for label, on in (result.get("categories") or {}).items():
                if on:
                    labels[label] = max(labels.get(label, 0.0), float(scores.get(label, 1.0)))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise HookUnavailable(f"{name} does not answer as /v1/moderations does") from None
    return labels if flagged else None

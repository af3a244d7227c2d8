"""A classification or reward model as a hook. Another headrace server runs it on our engine, and is
asked by its /classify: `moderation=model:URL#labels=...`, `score=model:URL`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import ConfigError, HookUnavailable
from headrace.hooks.contract import Asked, Verdict
from headrace.hooks.remote import Remote, choice, number

log = logging.getLogger("headrace.hooks")

PATH = "/classify"
WINDOW_CHARS, OVERLAP_CHARS = 2000, 200  # of a text that is judged piece by piece
BATCH = 128  # pieces in one request


class ModelModeration:
    """Blocks (or annotates) what the model gives one of the labels.

    Options behind `#`: labels = names with commas, required; threshold = least probability, 0.5;
    window = characters that are judged at once; flagged, fail, timeout_s and key_env as
    `HttpModeration` has them.
    """

    def __init__(self, text: str) -> None:
        self._remote = Remote(text, {"labels", "threshold", "window", "flagged", "fail"})
        options = self._remote.options
        self._labels = frozenset(filter(None, options.get("labels", "").split(",")))
        if not self._labels:
            raise ConfigError(f"{text}: #labels=... names what is not wanted", param="hook")
        self._threshold = number(options, "threshold", 0.5)
        self._window = int(number(options, "window", WINDOW_CHARS))
        if self._window <= OVERLAP_CHARS:
            raise ConfigError(f"{text}: window is at most {OVERLAP_CHARS}", param="hook")
        self._flagged = choice(options, "flagged", "block", "annotate")
        self._open = choice(options, "fail", "closed", "open") == "open"

    def close(self) -> None:
        """See `Hooks.close`."""
        self._remote.close()

    async def judge(self, texts: Sequence[str]) -> Verdict:
        """See `Moderation`."""
        pieces = [piece for text in texts for piece in _pieces(text, self._window)]
        labels: dict[str, float] = {}
        try:
            for at in range(0, len(pieces), BATCH):
                for label, probability in await self._ask(pieces[at : at + BATCH]):
                    if label in self._labels and probability >= self._threshold:
                        labels[label] = max(labels.get(label, 0.0), probability)
        except HookUnavailable as error:
            if not self._open:
                raise
            log.warning("moderation fails open: %s", error.message)
            return Verdict()
        if not labels:
            return Verdict()
        names = ", ".join(sorted(labels))
        if self._flagged == "block":
            return Verdict("block", f"the request was refused by moderation: {names}", labels)
        return Verdict("annotate", labels=labels)

    async def _ask(self, texts: list[str]) -> list[tuple[str, float]]:
        answer = await self._remote.ask({"input": texts}, PATH)
        data = _data(answer, self._remote.name, len(texts))
        return [(str(one["label"]), max(map(float, one["probs"]))) for one in data]


class ModelScorer:
    """Scores an answer as the model does: a reward model (one label) by its value, another by the
    probability of the label with the number in `#label=N` (0 if not given).

    A chat is scored as its messages with the answer, a completion as one text. timeout_s and
    key_env as `HttpModeration` has them.
    """

    def __init__(self, text: str) -> None:
        self._remote = Remote(text, {"label"})
        label = self._remote.options.get("label", "0")
        if not label.isdecimal():
            raise ConfigError(f"{text}: label is a number from 0", param="hook")
        self._label = int(label)
        self._raw = False  # it was found to have one label

    def close(self) -> None:
        """See `Hooks.close`."""
        self._remote.close()

    async def score(self, asked: Asked, answers: Sequence[str]) -> list[float]:
        """See `Scorer`."""
        return await asyncio.gather(*(self._one(asked, answer) for answer in answers))

    async def _one(self, asked: Asked, answer: str) -> float:
        body: dict[str, Any] = {"input": [asked.prompt + answer]}
        if asked.messages:
            body = {"messages": [*asked.messages, {"role": "assistant", "content": answer}]}
        raw = self._raw
        answered = await self._remote.ask({**body, "use_activation": not raw}, PATH)
        found = _data(answered, self._remote.name, 1)[0]["probs"]
        if len(found) == 1 and not raw:  # its sigmoid may be 1 for all good answers
            self._raw = True
            return await self._one(asked, answer)
        if not self._label < len(found):
            raise HookUnavailable(f"{self._remote.name} has {len(found)} labels, not {self._label}")
        return float(found[self._label])


def _pieces(text: str, window: int) -> Iterator[str]:
    """The text in pieces that overlap."""
    step = window - OVERLAP_CHARS
    for start in range(0, max(1, len(text) - OVERLAP_CHARS), step):
        yield text[start : start + window]


def _data(answer: Any, name: str, count: int) -> list[dict[str, Any]]:
    """The `data` of /classify. Raises HookUnavailable for an answer of another shape."""
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or len(data) != count:
        raise HookUnavailable(f"{name} does not answer as /classify does")
    for one in data:
        if not (isinstance(one, dict) and one.get("probs") and "label" in one):
            raise HookUnavailable(f"{name} does not answer as /classify does")
    return data

"""Lists of words as hooks: `moderation=words:FILE` and `filter=words:FILE`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headrace.hooks.contract import Piece, Verdict
from headrace.hooks.phrases import Phrases, fold, read_phrases

INLINE_CHARS = 4096  # longer texts are searched in a thread
MASK = "***"
STOP = "!stop"


class WordModeration:
    """Blocks a prompt that holds one of the phrases. A line `phrase => label` annotates instead."""

    def __init__(self, path: str) -> None:
        self._labels = read_phrases(path, "moderation")
        self._phrases = Phrases(self._labels)

    async def judge(self, texts: Sequence[str]) -> Verdict:
        """See `Moderation`. The reason does not say which phrase it was."""
        if sum(map(len, texts)) <= INLINE_CHARS:
            return self._judge(texts)
        return await asyncio.to_thread(self._judge, texts)

    def _judge(self, texts: Sequence[str]) -> Verdict:
        labels: dict[str, float] = {}
        for text in texts:
            folded, at = fold(text), 0
            while (found := self._phrases.search(folded, at)) is not None:
                start, at = found
                label = self._labels[folded[start:at]]
                if not label:
                    return Verdict("block", "the request holds words that this server refuses")
                labels[label] = labels.get(label, 0.0) + 1.0
        return Verdict("annotate", labels=labels) if labels else Verdict()


class WordFilter:
    """Writes `***` for each of the phrases in an answer, or what its line says: `phrase => text`.
    `phrase => !stop` ends the answer before it."""

    def __init__(self, path: str) -> None:
        self._texts = {
            phrase: text or MASK for phrase, text in read_phrases(path, "filter").items()
        }
        self._phrases = Phrases(self._texts)

    def open(self) -> WordStream:
        """See `Filter`."""
        return WordStream(self._phrases, self._texts)


class WordStream:
    """See `FilterStream`. Holds back at most the longest phrase."""

    def __init__(self, phrases: Phrases, texts: Mapping[str, str]) -> None:
        self._phrases, self._texts = phrases, texts
        self._before = ""  # the last character that is not held: a phrase may not go on from it
        self._held = ""

    def feed(self, text: str) -> Piece:
        return self._replace(text, last=False)

    def flush(self) -> Piece:
        return self._replace("", last=True)

    def _replace(self, text: str, *, last: bool) -> Piece:
        whole = self._before + self._held + text
        folded, at = fold(whole), len(self._before)
        out: list[str] = []
        while True:
            # Before `safe` nothing that still comes can begin a phrase or make one longer.
            safe = len(whole) if last else self._phrases.pending(folded, at)
            found = self._phrases.search(folded, at)
            if found is None or found[0] >= safe:
                break
            out.append(whole[at : found[0]])
            at = found[1]
            instead = self._texts[folded[found[0] : at]]
            if instead == STOP:
                return Piece("".join(out), stop=True)
            out.append(instead)
        out.append(whole[at:safe])
        self._before, self._held = whole[max(0, safe - 1) : safe], whole[safe:]
        return Piece("".join(out))

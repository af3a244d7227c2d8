"""Bias and bans: which tokens a row may draw at all."""

from __future__ import annotations

import numpy as np

from headrace.messages import Rules
from headrace.sampling.history import History, Ids


def _ids(ids: list[int]) -> Ids:
    return np.array(ids, np.int64)


class RowRules:
    """`messages.Rules` of one row, as arrays; see `reference.ruled`."""

    def __init__(self, rules: Rules, prompt_tokens: int) -> None:
        self.bias_ids = _ids([token for token, _ in rules.bias])
        self.bias = np.array([bias for _, bias in rules.bias], np.float64)
        self.allowed = _ids(rules.allowed) if rules.allowed else None
        always = [word[0] for word in rules.bad_words if len(word) == 1]
        self._banned = _ids(rules.banned + always)
        self._words = [
            (_ids(word[:-1]), _ids(word[-1:])) for word in rules.bad_words if len(word) > 1
        ]
        self._held = _ids(rules.held)
        self._held_before = prompt_tokens + rules.min_tokens  # position of the first free token

    def banned(self, position: int, history: History | None) -> Ids:
        """Ids that may not stand at `position`."""
        found = [self._banned]
        if position < self._held_before:
            found.append(self._held)
        for before, last in self._words:
            assert history is not None, "bad words look at the history"
            if np.array_equal(history.last(position, before.size), before):
                found.append(last)
        return np.concatenate(found) if len(found) > 1 else found[0]

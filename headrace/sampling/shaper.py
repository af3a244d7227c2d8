"""What one row does to its logits before temperature: rules, penalties, and the ids they look at.

A row whose parameters ask for none of it has no Shaper. `reference` has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.messages import Dry, Join, Lz, Repetition, Sampling
from headrace.sampling.history import History, Ids
from headrace.sampling.matches import largest_each, suffix_matches
from headrace.sampling.reference import LONGEST_MATCH, LZ_LOOKBACK, dry_penalty
from headrace.sampling.rules import RowRules

Values = npt.NDArray[np.float64]


class Shaper:
    """One sequence's rules and penalties. `history` is None where nothing looks at it."""

    __slots__ = (
        "_breakers",
        "_dry_table",
        "dry",
        "history",
        "lz",
        "prompt_tokens",
        "repetition",
        "rules",
    )

    def __init__(self, sampling: Sampling, prompt_tokens: int, ids: Sequence[int]) -> None:
        self.prompt_tokens = prompt_tokens
        rules = sampling.rules
        self.rules = None if rules is None else RowRules(rules, prompt_tokens)
        self.repetition, self.dry, self.lz = sampling.repetition, sampling.dry, sampling.lz
        self.history = History(ids) if sampling.needs_history else None
        self._breakers: Ids = np.array([] if self.dry is None else self.dry.breakers, np.int64)
        self._dry_table = None if self.dry is None else _dry_table(self.dry)

    @classmethod
    def of(cls, join: Join) -> Shaper | None:
        """None where the row's parameters leave logits as they are."""
        s = join.sampling
        if s.rules is None and s.repetition is None and s.dry is None and s.lz is None:
            return None
        return cls(s, join.prompt_tokens, join.history)

    @property
    def penalises(self) -> bool:
        """It has penalties, beside or without rules."""
        return any(part is not None for part in (self.repetition, self.dry, self.lz))

    def _last(self, position: int, window: int) -> Ids:
        assert self.history is not None, "this row keeps no history"
        return self.history.last(position, window)

    def repeated(self, how: Repetition, position: int) -> tuple[Ids, Values]:
        """The distinct ids within the window, and how often each is in the output part of it."""
        window = self._last(position, how.window)
        output = window[max(0, window.size - (position - self.prompt_tokens)) :]
        ids, where = np.unique(window, return_inverse=True)
        counts = np.bincount(where[window.size - output.size :], minlength=ids.size)
        return ids, counts.astype(np.float64)

    def dried(self, dry: Dry, position: int) -> tuple[Ids, Values]:
        """Distinct ids and what each of them loses."""
        s = self._last(position, dry.window)
        breaks = np.isin(s[::-1][:LONGEST_MATCH], self._breakers)
        longest = int(breaks.argmax()) if breaks.any() else LONGEST_MATCH
        lengths = suffix_matches(s, longest)
        longer = lengths >= dry.allowed_length
        longer[longer] = ~np.isin(s[longer], self._breakers)
        ids, lengths = largest_each(s[longer], lengths[longer])
        assert self._dry_table is not None
        return ids, self._dry_table[lengths]

    def compressed(self, lz: Lz, position: int, vocab: int) -> tuple[Ids, Values]:
        """Distinct ids and what each of them loses."""
        s = self._last(position, lz.window)
        places = np.arange(s.size)
        keys = suffix_matches(s, LZ_LOOKBACK) * s.size + places
        ids, best = largest_each(s, keys)
        distance = s.size - best % max(1, s.size)
        saved_bits = np.maximum(0.0, np.log2(vocab) - np.log2(distance))
        return ids, lz.strength * saved_bits


def _dry_table(dry: Dry) -> Values:
    """[n] -> what a token that lengthens a repeat of n tokens loses; 0 below allowed_length."""
    lengths = range(LONGEST_MATCH + 1)
    return np.array([dry_penalty(dry, n) if n >= dry.allowed_length else 0.0 for n in lengths])

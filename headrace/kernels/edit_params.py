"""The device's table of what rows change in their logits, and the lists of ids that it points to.

A row of the table is EDIT_WIDTH int32. Its lists stand one after another in one arena of int32,
from an offset of the row's own. A number that must be more exact than float32 takes two entries,
whose float32 sum to it.
"""

from __future__ import annotations

import math

import numpy as np
import triton.language as tl

from headrace.kernels.draw_params import GREEDY_BELOW, is_few
from headrace.messages import Sampling

# Entries of a row. Lists lie in the arena in this order, from AT on: bias ids, bias values,
# allowed, banned, held, breakers, starts of words, lengths of words, words.
AT = tl.constexpr(0)
BIASES = tl.constexpr(1)  # how many; so for the next four
ALLOWED = tl.constexpr(2)
BANNED = tl.constexpr(3)
HELD = tl.constexpr(4)
BREAKERS = tl.constexpr(5)
WORDS = tl.constexpr(6)
LONGEST_WORD = tl.constexpr(7)
MIN_TOKENS = tl.constexpr(8)
PROMPT_TOKENS = tl.constexpr(9)
USES = tl.constexpr(10)  # bits: which of the penalties; whether top_k is small
REPETITION = tl.constexpr(11)  # two entries, as those below
FREQUENCY = tl.constexpr(13)
PRESENCE = tl.constexpr(15)
PENALTY_WINDOW = tl.constexpr(17)
DRY_MULTIPLIER = tl.constexpr(18)
DRY_LOG_BASE = tl.constexpr(20)
DRY_ALLOWED = tl.constexpr(22)
DRY_WINDOW = tl.constexpr(23)
LZ_STRENGTH = tl.constexpr(24)
LZ_WINDOW = tl.constexpr(26)
SIGMA = tl.constexpr(27)
TYPICAL = tl.constexpr(29)
WIDTH = tl.constexpr(32)

USES_REPETITION = tl.constexpr(1)
USES_LZ = tl.constexpr(2)
USES_DRY = tl.constexpr(4)
IS_FEW = tl.constexpr(8)

EDIT_WIDTH: int = 32
_MOST = 2**31 - 1


def is_sampled(sampling: Sampling) -> bool:
    """Whether a row draws at random: greedy ones see no truncation."""
    return sampling.temperature >= GREEDY_BELOW


def edits(sampling: Sampling) -> bool:
    """Whether a row's logits must be written anew before its draw."""
    changed = (sampling.rules, sampling.repetition, sampling.dry, sampling.lz)
    if any(part is not None for part in changed):
        return True
    return is_sampled(sampling) and (sampling.top_n_sigma > 0.0 or sampling.typical_p < 1.0)


def lists_of(sampling: Sampling) -> list[int]:
    """What a row keeps in the arena."""
    rules, flat = sampling.rules, list[int]()
    if rules is not None:
        flat += [token for token, _ in rules.bias]
        flat += np.array([bias for _, bias in rules.bias], np.float32).view(np.int32).tolist()
        flat += rules.allowed + rules.banned + rules.held
    if sampling.dry is not None:
        flat += sampling.dry.breakers
    if rules is not None and rules.bad_words:
        words = rules.bad_words
        start = len(flat) + 2 * len(words)
        lengths = [len(word) for word in words]
        flat += [start + sum(lengths[:i]) for i in range(len(words))]
        flat += lengths
        for word in words:
            flat += word
    return flat


def pack_edits(sampling: Sampling, prompt_tokens: int, at: int) -> list[int]:
    """One row of the table, [EDIT_WIDTH] of int32; `at`: where its lists begin in the arena."""
    row = [0] * EDIT_WIDTH
    rules = sampling.rules
    row[AT.value], row[PROMPT_TOKENS.value] = at, prompt_tokens
    if rules is not None:
        row[BIASES.value], row[ALLOWED.value] = len(rules.bias), len(rules.allowed)
        row[BANNED.value], row[HELD.value] = len(rules.banned), len(rules.held)
        row[WORDS.value], row[MIN_TOKENS.value] = len(rules.bad_words), rules.min_tokens
        row[LONGEST_WORD.value] = max((len(word) for word in rules.bad_words), default=0)
    if (again := sampling.repetition) is not None:
        row[USES.value] |= USES_REPETITION.value
        _double(row, REPETITION.value, again.repetition)
        _double(row, FREQUENCY.value, again.frequency)
        _double(row, PRESENCE.value, again.presence)
        row[PENALTY_WINDOW.value] = min(again.window, _MOST)
    if (dry := sampling.dry) is not None and dry.multiplier > 0.0:
        row[USES.value] |= USES_DRY.value
        _double(row, DRY_MULTIPLIER.value, dry.multiplier)
        _double(row, DRY_LOG_BASE.value, math.log(dry.base))
        row[DRY_ALLOWED.value] = min(dry.allowed_length, _MOST)
        row[DRY_WINDOW.value] = min(dry.window, _MOST)
    if dry is not None:
        row[BREAKERS.value] = len(dry.breakers)
    if (lz := sampling.lz) is not None:
        row[USES.value] |= USES_LZ.value
        _double(row, LZ_STRENGTH.value, lz.strength)
        row[LZ_WINDOW.value] = min(lz.window, _MOST)
    sampled = is_sampled(sampling)
    if sampled and is_few(sampling):
        row[USES.value] |= IS_FEW.value
    _double(row, SIGMA.value, sampling.top_n_sigma if sampled else 0.0)
    _double(row, TYPICAL.value, sampling.typical_p if sampled else 1.0)
    return row


def _double(row: list[int], at: int, value: float) -> None:
    high = np.float32(value)
    row[at : at + 2] = np.array([high, value - float(high)], np.float32).view(np.int32).tolist()

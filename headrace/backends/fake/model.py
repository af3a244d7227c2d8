"""The fake model: a pure function from a prefix to its next token.

state[p] = advance(state[p-1], token[p]), a 64-bit mix; root(adapter) is the state before it all.
Each state has eight candidates: mostly lowercase letters and spaces, the end of turn first in about
1 of 200 states. Candidate i has the probability 2**-(i / temperature), cut by top_k, top_p and
min_p and scaled to 1. Greedy takes candidate 0; a draw depends on state, seed, choice and position.

Draws that ask for more (rules, penalties, a grammar mask, other filters) go by `sampling.reference`
over `logits`: those of the candidates are TOP + the logarithms of their weights, all others lie far
below, so that something is left whatever is forbidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from headrace.messages import Sampling
from headrace.sampling import reference as definition

VOCAB_SIZE = 259
END_OF_TEXT, START_OF_TURN, END_OF_TURN = 256, 257, 258
CANDIDATES = 8
LETTERS = b"etaoinshrdlucmfwypvbgk eta oin "  # often 'e', 't', 'a'; spaces now and then
END_ONE_IN = 200
TOP = 8.0  # positive, so that a repetition penalty has something to divide
FLOOR = -40.0  # logits of tokens that are no candidates lie in (FLOOR - 8, FLOOR]

_MASK = 2**64 - 1
_TOKENS = np.arange(VOCAB_SIZE, dtype=np.uint64)


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def root(adapter: str) -> int:
    """The state before the first token; an adapter changes all that follows."""
    return int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest(), "little")


def advance(state: int, token: int) -> int:
    """The state after one more token."""
    return _mix((state * 0x9E3779B97F4A7C15 + token + 1) & _MASK)


def candidate(state: int, rank: int, eos: int | None) -> int:
    """The token of this rank, 0 = most likely."""
    bits = _mix(state ^ rank * 0x2545F4914F6CDD1D & _MASK)
    if eos is not None and rank == 0 and bits % END_ONE_IN == 0:
        return eos
    return LETTERS[(bits >> 32) % len(LETTERS)]


def logits(state: int, eos: int | None) -> definition.Row:
    """[VOCAB_SIZE]: what the model says at temperature 1."""
    # One multiplication spreads the bits enough to order the tokens that are no candidates.
    mixed = (_TOKENS ^ np.uint64(state)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(61)
    z = FLOOR - mixed.astype(np.float64)
    weights: dict[int, float] = {}
    for rank in range(CANDIDATES):
        token = candidate(state, rank, eos)
        weights[token] = weights.get(token, 0.0) + 2.0**-rank
    for token, weight in weights.items():
        z[token] = TOP + math.log(weight)
    return z


def _plain(s: Sampling) -> bool:
    """Only the candidates matter."""
    shaped = s.needs_history or s.rules is not None
    return not shaped and s.typical_p >= 1 and s.top_n_sigma <= 0


def draw(
    state: int,
    sampling: Sampling,
    choice: int,
    position: int,
    eos: int | None,
    *,
    ids: Sequence[int] = (),
    prompt_tokens: int = 0,
    mask: definition.Mask | None = None,
) -> int | None:
    """The token at `position`, given the state of the one before it; None if none is allowed.

    ids: the sequence before it, where sampling needs a history.
    """
    if _plain(sampling) and mask is None:
        return _draw_candidate(state, sampling, choice, position, eos)
    known = ids if sampling.needs_history else range(position)
    assert len(known) == position, f"{len(known)} ids before position {position}"
    return definition.draw(logits(state, eos), sampling, choice, known, prompt_tokens, mask)


def greedy_token(state: int, sampling: Sampling, eos: int | None) -> int:
    """What a draw takes if its mask allows it; -1 if that depends on the mask."""
    shaped = sampling.needs_history or sampling.rules is not None
    return candidate(state, 0, eos) if sampling.temperature == 0 and not shaped else -1


def _draw_candidate(
    state: int, sampling: Sampling, choice: int, position: int, eos: int | None
) -> int:
    if sampling.temperature == 0:
        return candidate(state, 0, eos)
    weights = [2 ** -(rank / sampling.temperature) for rank in range(CANDIDATES)]
    kept = weights[: sampling.top_k] if sampling.top_k > 0 else weights
    kept = [weight for weight in kept if weight >= sampling.min_p * weights[0]]
    nucleus, total = sampling.top_p * sum(kept), 0.0
    for count, weight in enumerate(kept, 1):
        total += weight
        if total >= nucleus:
            kept = kept[:count]
            break
    noise = _mix(_mix(_mix(sampling.seed ^ state) + choice & _MASK) + position & _MASK)
    point = noise / 2**64 * sum(kept)
    for rank, weight in enumerate(kept):
        point -= weight
        if point < 0:
            return candidate(state, rank, eos)
    return candidate(state, len(kept) - 1, eos)


def reference(
    prompt: list[int],
    sampling: Sampling,
    choice: int,
    n_tokens: int,
    *,
    adapter: str = "",
    eos: int | None = END_OF_TURN,
) -> list[int]:
    """The first `n_tokens` tokens that any correct schedule yields (past an end of turn, too)."""
    state = root(adapter)
    for token in prompt:
        state = advance(state, token)
    ids = prompt.copy()
    for position in range(len(prompt), len(prompt) + n_tokens):
        drawn = draw(state, sampling, choice, position, eos, ids=ids, prompt_tokens=len(prompt))
        assert drawn is not None, f"no token is allowed at position {position}"
        ids.append(drawn)
        state = advance(state, drawn)
    return ids[len(prompt) :]

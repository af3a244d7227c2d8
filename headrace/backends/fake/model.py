"""The fake model: a pure function from a prefix to its next token.

state[p] = advance(state[p-1], token[p]), a 64-bit mix; root(adapter) is the state before it all.
Each state has eight candidates: mostly lowercase letters and spaces, the end of turn first in about
1 of 200 states. Candidate i has the probability 2**-(i / temperature), cut by top_k, top_p and
min_p and scaled to 1. Greedy takes candidate 0; a draw depends on state, seed, choice and position.
"""

from __future__ import annotations

from hashlib import blake2b

from headrace.messages import Sampling

VOCAB_SIZE = 259
END_OF_TEXT, START_OF_TURN, END_OF_TURN = 256, 257, 258
CANDIDATES = 8
LETTERS = b"etaoinshrdlucmfwypvbgk eta oin "  # often 'e', 't', 'a'; spaces now and then
END_ONE_IN = 200

_MASK = 2**64 - 1


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


def draw(state: int, sampling: Sampling, choice: int, position: int, eos: int | None) -> int:
    """The token at `position`, given the state of the one before it."""
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
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + n_tokens):
        tokens.append(draw(state, sampling, choice, position, eos))
        state = advance(state, tokens[-1])
    return tokens

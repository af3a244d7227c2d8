"""Every stage between logits and a token, written out for one row: float64, no torch, no speed.

This file is the definition. `pipeline` (CPU) and `kernels` (GPU) are tested against it, and the
fake runner draws with it. Throughout:

  z    [vocab] float64 logits; -inf = cannot be drawn. Functions return a new array.
  ids  the sequence before the token to draw: prompt, then output. Its length is that token's
       position.

Order: rules, repetition, lz, dry, grammar mask, temperature, top_n_sigma, top_k, top_p, min_p,
typical_p, softmax, draw. Greedy rows stop before temperature and take the first largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headrace.messages import Dry, Logprobs, Lz, Repetition, Rules, Sampling
from headrace.sampling.params import GREEDY_BELOW
from headrace.sampling.rng import uniform_reference

Row = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

LONGEST_MATCH = 256  # tokens of a repeat that dry counts
MOST_DRY = 1000.0  # what dry takes at most: exp(-1000 / 2) is 0 beside any other token
LZ_LOOKBACK = 32  # tokens of a match that lz compares


def ruled(z: Row, rules: Rules, ids: Sequence[int], prompt_tokens: int) -> Row:
    """logit_bias: z += b. Then -inf for what is not allowed, for banned ids, for the last id of a
    bad word that the sequence stands before, and for `held` ids before `min_tokens` of output.

    A bad word [a, b, c] bans c when ids end with a, b, prompt included; [a] bans a always.
    """
    z, position = z.copy(), len(ids)
    for token, bias in rules.bias:
        z[token] += bias
    if rules.allowed:
        kept = np.full_like(z, -np.inf)
        kept[rules.allowed] = z[rules.allowed]
        z = kept
    z[rules.banned] = -np.inf
    for word in rules.bad_words:
        before = word[:-1]
        if list(ids[position - len(before) :]) == before and len(before) <= position:
            z[word[-1]] = -np.inf
    if position - prompt_tokens < rules.min_tokens:
        z[rules.held] = -np.inf
    return z


def _last(ids: Sequence[int], window: int) -> list[int]:
    """The last `window` ids; 0 = all."""
    return list(ids[-window:]) if window else list(ids)


def repeated(z: Row, how: Repetition, ids: Sequence[int], prompt_tokens: int) -> Row:
    """Penalties on single tokens that were there, within the last `window` ids.

    repetition r, prompt and output (CTRL, arXiv 1909.05858, section 4.1, in the form that
    everybody uses for negative logits): z > 0 ? z / r : z * r, once a token.
    Then frequency f and presence p, output only (OpenAI): z -= f * count + p * (count > 0).
    """
    z = z.copy()
    window = _last(ids, how.window)
    output = window[-(len(ids) - prompt_tokens) :] if len(ids) > prompt_tokens else []
    for token in set(window):
        z[token] = z[token] / how.repetition if z[token] > 0 else z[token] * how.repetition
        count = output.count(token)
        z[token] -= how.frequency * count + how.presence * (count > 0)
    return z


def match_length(s: Sequence[int], i: int, longest: int, breakers: Sequence[int] = ()) -> int:
    """The largest k <= longest with s[i-k : i] == s[len(s)-k :], of ids that are no breakers."""
    k = 0
    while k < min(i, longest):
        token = s[i - 1 - k]
        if token != s[len(s) - 1 - k] or token in breakers:
            break
        k += 1
    return k


def dried(z: Row, dry: Dry, ids: Sequence[int]) -> Row:
    """DRY, "don't repeat yourself" (oobabooga/text-generation-webui pull request 5677; llama.cpp
    pull request 9702), over the last `window` ids s:

    For each i, token s[i] would lengthen the repeat of the n = match_length(s, i) tokens before it.
    With the largest n over all i of that token: if n >= allowed_length,
    z -= min(multiplier * base ** (n - allowed_length), MOST_DRY).

    Breakers are never penalised and end a repeat. n is at most LONGEST_MATCH (text-generation-webui
    stops at 50 tokens; llama.cpp bounds the exponent so that a float cannot overflow).
    """
    z, s = z.copy(), _last(ids, dry.window)
    longest: dict[int, int] = {}
    for i, token in enumerate(s):
        if token not in dry.breakers:
            n = match_length(s, i, LONGEST_MATCH, dry.breakers)
            longest[token] = max(longest.get(token, 0), n)
    for token, n in longest.items():
        if n >= dry.allowed_length:
            z[token] -= dry_penalty(dry, n)
    return z


def dry_penalty(dry: Dry, n: int) -> float:
    """What a token that lengthens a repeat of n >= allowed_length tokens loses; multiplier > 0."""
    log_penalty = math.log(dry.multiplier) + (n - dry.allowed_length) * math.log(dry.base)
    if log_penalty >= math.log(MOST_DRY):
        return MOST_DRY
    return float(dry.multiplier * dry.base ** (n - dry.allowed_length))


def compressed(z: Row, lz: Lz, ids: Sequence[int]) -> Row:
    """The LZ penalty (Ginart et al., arXiv 2504.20131), as in its authors' implementation
    (SGLang pull request 4647), over the last `window` ids s:

    An LZ77 coder writes a token as a literal of log2(vocab) bits, or points to the place where the
    longest match goes on with it: log2(distance) bits. Of all i with s[i] = token take the one with
    the longest match_length(s, i, LZ_LOOKBACK), the nearest among equals; distance = len(s) - i,
    1 for the last token. Then z -= strength * max(0, log2(vocab) - log2(distance)).

    Tokens outside the window lose nothing. The authors use strength 0.15, a window of 512 and a
    lookback of 32. Unlike theirs, the window holds prompt and output, and its first 32 tokens
    count too: their matches are as long as the window allows.
    """
    z, s = z.copy(), _last(ids, lz.window)
    best: dict[int, tuple[int, int]] = {}  # token -> longest match, then largest i
    for i, token in enumerate(s):
        best[token] = max(best.get(token, (-1, -1)), (match_length(s, i, LZ_LOOKBACK), i))
    for token, (_, i) in best.items():
        saved_bits = math.log2(z.size) - math.log2(len(s) - i)
        z[token] -= lz.strength * max(0.0, saved_bits)
    return z


def masked(z: Row, mask: Mask) -> Row:
    """Grammar: -inf where mask is False."""
    return np.where(mask, z, -np.inf)


def shaped(
    z: Row, sampling: Sampling, ids: Sequence[int], prompt_tokens: int, mask: Mask | None = None
) -> Row:
    """Everything before temperature."""
    if sampling.rules is not None:
        z = ruled(z, sampling.rules, ids, prompt_tokens)
    if sampling.repetition is not None:
        z = repeated(z, sampling.repetition, ids, prompt_tokens)
    if sampling.lz is not None:
        z = compressed(z, sampling.lz, ids)
    if sampling.dry is not None:
        z = dried(z, sampling.dry, ids)
    return z if mask is None else masked(z, mask)


# ---------------------------------------------------------------- truncation


def _order(keys: Row) -> list[int]:
    """Ids by falling key, lowest id first among equals."""
    return [int(i) for i in np.argsort(-keys, kind="stable")]


def _only(z: Row, kept: Sequence[int]) -> Row:
    out = np.full_like(z, -np.inf)
    out[list(kept)] = z[list(kept)]
    return out


def softmax(z: Row) -> Row:
    """exp(z) / sum; needs a finite maximum."""
    weights = np.exp(z - z.max())
    return np.asarray(weights / math.fsum(weights))


def cut_n_sigma(z: Row, n: float) -> Row:
    """top_n_sigma (arXiv 2411.07641): keep z >= max - n * sigma, sigma the standard deviation of
    the finite logits (divided by their number). z / T scales both sides: any T keeps the same.
    n = 0 is off.
    """
    if n <= 0:
        return z
    return np.where(z >= z.max() - n * z[np.isfinite(z)].std(), z, -np.inf)


def cut_top_k(z: Row, k: int) -> Row:
    """The k largest, lowest ids first among equals; k = 0 is off."""
    return _only(z, _order(z)[:k]) if 0 < k < z.size else z


def _reach(z: Row, order: list[int], p: float) -> Row:
    """Tokens in this order as long as those before sum to less than p; the first one always."""
    probability, kept, mass = softmax(z), order[:1], 0.0
    for previous, token in pairwise(order):
        mass += float(probability[previous])
        if mass >= p:
            break
        kept.append(token)
    return _only(z, kept)


def cut_top_p(z: Row, p: float) -> Row:
    """Nucleus (arXiv 1904.09751): the fewest most likely tokens whose probabilities reach p; at
    least one, also for p = 0. p = 1 is off.
    """
    return _reach(z, _order(z), p) if p < 1 else z


def cut_min_p(z: Row, p: float) -> Row:
    """min-p (arXiv 2407.01082): tokens at least p times as likely as the most likely one."""
    return np.where(np.exp(z - z.max()) >= p, z, -np.inf)


def cut_typical_p(z: Row, p: float) -> Row:
    """Locally typical sampling (arXiv 2202.00666): by |-log prob - entropy|, smallest first, the
    fewest tokens whose probabilities reach p; at least one. p = 1 is off. Lowest ids first among
    equals. Entropy and probabilities are those of the tokens that earlier stages left.
    """
    if p >= 1:
        return z
    finite = np.isfinite(z)
    log_p = np.where(finite, z - z.max() - math.log(math.fsum(np.exp(z - z.max()))), 0.0)
    entropy = -math.fsum(np.exp(log_p[finite]) * log_p[finite])
    distance = np.where(finite, np.abs(-log_p - entropy), np.inf)
    order = [i for i in _order(-distance) if finite[i]]
    return _reach(z, order, p)


def truncated(z: Row, sampling: Sampling) -> Row:
    """Temperature, then every filter. Needs temperature >= GREEDY_BELOW and a finite maximum."""
    z = (z - z.max()) / sampling.temperature
    z = cut_n_sigma(z, sampling.top_n_sigma)
    z = cut_top_k(z, sampling.top_k)
    z = cut_top_p(z, sampling.top_p)
    z = cut_min_p(z, sampling.min_p)
    return cut_typical_p(z, sampling.typical_p)


# ---------------------------------------------------------------- the draw


def draw(
    z: Row,
    sampling: Sampling,
    choice: int,
    ids: Sequence[int],
    prompt_tokens: int,
    mask: Mask | None = None,
) -> int | None:
    """The token at position len(ids); None if no token is allowed.

    u = rng.uniform_reference(seed, choice, position); the first token, by id, whose cumulative
    weight exceeds u times the total.
    """
    z = shaped(z, sampling, ids, prompt_tokens, mask)
    if z.max() == -np.inf:
        return None
    if sampling.temperature < GREEDY_BELOW:
        return int(z.argmax())
    z = truncated(z, sampling)
    weights = np.exp(z - z.max())
    u = uniform_reference(sampling.seed, choice, len(ids))
    target, mass = u * math.fsum(weights), 0.0
    kept = [int(i) for i in np.flatnonzero(weights)]
    for token in kept:
        mass += float(weights[token])
        if mass > target:
            return token
    return kept[-1]


def logprobs(z: Row, token: int, top: int) -> Logprobs:
    """What to report of `token` and of the `top` most likely ones: log-softmax of the model's own
    logits, before any stage. rank = 1 + the number of strictly larger logits.
    """
    log_p = z - z.max() - math.log(math.fsum(np.exp(z - z.max())))
    best = _order(z)[:top]
    rank = 1 + int((z > z[token]).sum())
    return Logprobs(float(log_p[token]), rank, best, [float(log_p[i]) for i in best])

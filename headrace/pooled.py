"""What `headrace.LLM` returns for a prompt that it embeds or classifies."""

from __future__ import annotations

import msgspec

from headrace.completion import Job
from headrace.sources.card import ModelCard
from headrace.vectors import embedding, floats, probabilities


class Embedding(msgspec.Struct, kw_only=True):
    """One prompt as a vector."""

    prompt_index: int  # which prompt of the call
    prompt_token_ids: list[int]
    embedding: list[float] = []
    cached_tokens: int = 0  # prompt tokens that the prefix cache held
    error: str = ""  # this prompt alone failed in the engine: why


class Classification(msgspec.Struct, kw_only=True):
    """What a classification head says of one prompt."""

    prompt_index: int
    prompt_token_ids: list[int]
    label: str = ""  # of the highest score
    probs: list[float] = []  # by label, see `headrace.vectors.probabilities`
    scores: list[float] = []  # the same before they became probabilities: a reward, say
    cached_tokens: int = 0
    error: str = ""


def embedded(at: int, job: Job, dimensions: int | None, *, normalize: bool) -> Embedding:
    """Of a job that has ended."""
    out = Embedding(
        prompt_index=at,
        prompt_token_ids=job.submit.prompt,
        cached_tokens=job.cached_tokens,
        error=job.error,
    )
    if job.vector is not None:
        out.embedding = embedding(job.vector, dimensions, normalize=normalize).tolist()
    return out


def classified(at: int, job: Job, card: ModelCard) -> Classification:
    """Of a job that has ended."""
    out = Classification(
        prompt_index=at,
        prompt_token_ids=job.submit.prompt,
        cached_tokens=job.cached_tokens,
        error=job.error,
    )
    if job.vector is not None:
        scores = floats(job.vector)
        out.scores = scores.tolist()
        out.probs = probabilities(scores, card.problem).tolist()
        out.label = card.labels[int(scores.argmax())]
    return out

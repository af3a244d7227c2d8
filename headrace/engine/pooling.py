"""Requests that want a vector instead of tokens: which can be served, and how chunks become one.

A mean comes chunk by chunk, each the sum of its tokens' hidden states. Its prompt reads no cache,
so its chunks reach from position 0 to its end without a gap; after a preemption they begin again.
"""

from __future__ import annotations

import numpy as np

from headrace.engine.protocol import Capacity
from headrace.engine.request import Sequence
from headrace.errors import InvalidRequest, RequestFailed
from headrace.messages import Submit

_FLOAT = np.dtype("<f4")


def refuse_pooling(submit: Submit, capacity: Capacity) -> None:
    """Raises InvalidRequest for what this model does not answer with."""
    if submit.pooling is None:
        if not capacity.generates:
            raise InvalidRequest(
                "this model has no output layer: it gives scores and embeddings, no text",
                param="model",
            )
        return
    if not capacity.width:
        raise InvalidRequest("this engine gives no embeddings", param="model")
    if submit.pooling == "scores" and not capacity.labels:
        raise InvalidRequest("this model has no classification head", param="model")
    if submit.max_tokens or submit.n != 1 or submit.grammar or submit.prompt_logprobs >= 0:
        raise InvalidRequest("a request for a vector asks for no tokens", param="pooling")


def vector_of(sequence: Sequence, values: bytes, start: int, end: int) -> bytes | None:
    """What a prompt's chunk [start, end) gave -> its vector, or None if the mean lacks chunks yet.

    Changes: sequence.pooled. Raises RequestFailed for a vector that is not finite.
    """
    vector = np.frombuffer(values, _FLOAT)
    if sequence.pooling == "mean":
        if start == 0:
            sequence.pooled = np.zeros(vector.shape)
        assert sequence.pooled is not None, f"chunk {start} to {end} of a mean comes first"
        sequence.pooled += vector
        if end < sequence.prompt_tokens:
            return None
        vector = (sequence.pooled / sequence.prompt_tokens).astype(_FLOAT)
    if not np.isfinite(vector).all():
        raise RequestFailed("the model's hidden states were not finite")
    return vector.tobytes()

"""What a caller gets of a vector that an engine gave: an embedding, probabilities, a similarity.

numpy is imported by who needs a number: an HTTP process that is asked for none does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import ContextTooLong, InvalidRequest
from headrace.messages import EngineInfo, Pooling
from headrace.sources.card import ModelCard
from headrace.sources.labels import Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

POOLINGS: dict[str, Pooling] = {"mean": "mean", "last": "last"}


def floats(raw: bytes) -> Floats:
    """`messages.Vector.values` as numbers."""
    import numpy as np

    return np.frombuffer(raw, "<f4")


def pooling_of(card: ModelCard, asked: str | None) -> Pooling:
    """The caller's, else the model's own, else the mean.

    Raises InvalidRequest where the model was made for one that is not computed here.
    """
    said = asked or card.pooling or "mean"
    if said not in POOLINGS:
        raise InvalidRequest(
            f"this model's own pooling is {said}, which is not supported: ask for mean or last",
            param="pooling",
        )
    return POOLINGS[said]


def check_generates(info: EngineInfo) -> None:
    """Raises InvalidRequest for a model without an output layer."""
    if not info.generates:
        raise InvalidRequest(
            "this model has no output layer: it gives scores and embeddings, no text", param="model"
        )


def check_lengths(info: EngineInfo, prompts: Sequence[Sequence[int]], param: str) -> None:
    """Raises InvalidRequest for a prompt without tokens, ContextTooLong for one with too many."""
    for at, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest(f"{param}: number {at} has no tokens", param=param)
        if len(prompt) > info.max_model_len:
            raise ContextTooLong(
                f"{param}: number {at} has {len(prompt)} tokens, and this server holds "
                f"{info.max_model_len}",
                param=param,
            )


def check_dimensions(info: EngineInfo, dimensions: int | None) -> None:
    """Raises InvalidRequest for more of them than there are."""
    if not info.width:
        raise InvalidRequest("this engine gives no embeddings", param="model")
    if dimensions is not None and not 1 <= dimensions <= info.width:
        raise InvalidRequest(
            f"dimensions = {dimensions} is not in 1 to {info.width}, the width of this model",
            param="dimensions",
        )


def check_labels(info: EngineInfo) -> None:
    """Raises InvalidRequest for a model that cannot classify."""
    if not info.labels:
        raise InvalidRequest(
            "this model has no classification head: an architecture XForSequenceClassification "
            "has one",
            param="model",
        )


def embedding(raw: bytes, dimensions: int | None = None, *, normalize: bool = True) -> Floats:
    """The first `dimensions` numbers, then of length 1 if asked for. A vector of zeros stays."""
    import numpy as np

    vector = floats(raw)[:dimensions]
    wide = vector.astype(np.float64)
    length = float(np.linalg.norm(wide)) if normalize else 0.0
    if not length:
        return vector
    unit: Floats = (wide / length).astype("<f4")
    return unit


def probabilities(scores: Floats, problem: Problem) -> Floats:
    """Softmax where one of several labels is true; where each may be, and of a single label,
    1 / (1 + exp(-score)); scores of a regression are what they are."""
    import numpy as np

    if problem == "regression":
        return scores
    wide = scores.astype(np.float64)
    if problem == "multi_label_classification" or len(scores) == 1:
        made = np.exp(-np.logaddexp(0.0, -wide))
    else:
        raised = np.exp(wide - wide.max())
        made = raised / raised.sum()
    found: Floats = made.astype("<f4")
    return found


def similarity(one: Floats, other: Floats) -> float:
    """The cosine of the angle between two vectors of length 1."""
    import numpy as np

    return float(np.dot(one.astype(np.float64), other.astype(np.float64)))

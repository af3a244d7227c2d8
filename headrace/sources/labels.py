"""What the classification head of a checkpoint says: the names of its labels, and of what kind they
are. Hugging Face's config.json of an architecture `XForSequenceClassification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from headrace.errors import ModelError

CLASSIFIER = "ForSequenceClassification"  # ends the name of an architecture with such a head
# How the scores of several labels become probabilities: one of them is true, each may be, or they
# are numbers of their own.
Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
_PROBLEMS: tuple[Problem, ...] = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """[label] -> its name; () for a model without a classification head.

    Raises ModelError for names that are not those of 0, 1, 2, ...
    """
    if not _architecture(config).endswith(CLASSIFIER):
        return ()
    named = config.get("id2label")
    if named is None:  # transformers leaves the names out where they are the usual ones of two
        return tuple(f"LABEL_{i}" for i in range(int(config.get("num_labels") or 2)))
    numbers = [str(i) for i in range(len(named))]
    if not named or sorted(map(str, named)) != sorted(numbers):
        raise ModelError(f"config.json: id2label names {sorted(named)}, not 0 to {len(named) - 1}")
    by_number = {str(i): str(name) for i, name in named.items()}
    return tuple(by_number[i] for i in numbers)


def problem_of(config: Mapping[str, Any]) -> Problem:
    """What config.json's problem_type says of a classification head; of none, the first.

    Raises ModelError for one that transformers does not know.
    """
    said = config.get("problem_type") if labels_of(config) else None
    said = said or _PROBLEMS[0]
    for known in _PROBLEMS:
        if said == known:
            return known
    raise ModelError(f"config.json: problem_type = {said!r}: one of {', '.join(_PROBLEMS)}")


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [""]
    return str(names[0])

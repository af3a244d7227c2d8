"""What becomes of an engine's vector: length, probabilities, and whose pooling it is."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from headrace.errors import InvalidRequest, ModelError
from headrace.sources.card import ModelCard, read_card
from headrace.sources.files import ModelFiles
from headrace.sources.labels import Problem
from headrace.sources.pooling import pooling_of as pooling_in
from headrace.vectors import embedding, pooling_of, probabilities, similarity

CARD = read_card(ModelFiles("fake", "fake", Path()))
NUMBERS = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=9)


@given(NUMBERS)
def test_a_length_of_one(numbers: list[float]) -> None:
    vector = np.array(numbers, "<f4")
    unit = embedding(vector.tobytes())
    assert unit.dtype == np.dtype("<f4")
    if vector.any():
        assert np.linalg.norm(unit.astype(np.float64)) == pytest.approx(1, rel=1e-5)
        assert similarity(unit, unit) == pytest.approx(1, rel=1e-5)
    else:
        assert unit.tobytes() == vector.tobytes()
    assert embedding(vector.tobytes(), normalize=False).tobytes() == vector.tobytes()


@given(NUMBERS, st.sampled_from(["single_label_classification", "multi_label_classification"]))
def test_probabilities(numbers: list[float], problem: Problem) -> None:
    scores = np.array(numbers, "<f4")
    found = probabilities(scores, problem)
    assert np.isfinite(found).all()
    assert ((found >= 0) & (found <= 1)).all()
    assert (np.diff(found[np.argsort(scores)]) >= 0).all(), "they keep the order of scores"
    if problem == "single_label_classification" and len(scores) > 1:
        assert found.sum() == pytest.approx(1, rel=1e-5)
    assert probabilities(scores, "regression") is scores


def test_whose_pooling() -> None:
    def card(said: str) -> ModelCard:
        return msgspec.structs.replace(CARD, pooling=said)

    assert pooling_of(card(""), None) == "mean"
    assert pooling_of(card("last"), None) == "last"
    assert pooling_of(card("cls_token"), "mean") == "mean"
    with pytest.raises(InvalidRequest, match="cls_token"):
        pooling_of(card("cls_token"), None)


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        ({}, ""),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"word_embedding_dimension": 8, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "cls_token+max_tokens"),
    ],
)
def test_the_models_own_word(modes: dict[str, object], said: str, tmp_path: Path) -> None:
    assert pooling_in(tmp_path) == ""
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    assert pooling_in(tmp_path) == said


@pytest.mark.parametrize("text", ["[]", "{", "3"])
def test_a_word_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(text)
    with pytest.raises(ModelError, match="1_Pooling"):
        pooling_in(tmp_path)

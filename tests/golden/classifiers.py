"""Tiny random models with a classification head, and what transformers says of them in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForSequenceClassification,
    GemmaConfig,
    GemmaForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from headrace.sources.files import ModelFiles
from tests.golden.reference import SHAPE

HEADS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForSequenceClassification),
    "mistral": (MistralConfig, MistralForSequenceClassification),
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification),
    "qwen3": (Qwen3Config, Qwen3ForSequenceClassification),
    "gemma": (GemmaConfig, GemmaForSequenceClassification),
    "gemma2": (Gemma2Config, Gemma2ForSequenceClassification),
}


def tiny_classifier(
    family: str, folder: Path, labels: int, **config: Any
) -> tuple[Any, ModelFiles]:
    """A random model with that many labels, in eval mode, and its files under `folder`."""
    torch.manual_seed(labels + sum(family.encode()))
    kind, model_kind = HEADS[family]
    shape = {"num_key_value_heads": 2, "num_labels": labels, "sliding_window": None}
    model = model_kind(kind(**(SHAPE | shape | config)))
    model.eval().save_pretrained(folder)
    return model, ModelFiles(f"{family}-{labels}", "hf", folder)


def hidden_states(model: Any, prompt: list[int]) -> npt.NDArray[np.float32]:
    """[tokens, hidden] after the last norm, of a model with any head."""
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return np.asarray(states.float().numpy(), np.float32)


def head_scores(model: Any, prompt: list[int]) -> npt.NDArray[np.float32]:
    """[labels] of the last token."""
    with torch.inference_mode():
        scores = model(torch.tensor([prompt])).logits[0]
    return np.asarray(scores.float().numpy(), np.float32)

"""Vectors and scores against transformers in float32, on every backend: alone, in chunks, in a
crowd of other lengths, and after a prefix that the cache holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from headrace.engine.loop import Engine
from headrace.errors import ModelError
from headrace.launch import make_cache
from headrace.messages import Pooling, Submit
from headrace.models.spec import from_hf
from headrace.sources.card import read_card
from headrace.sources.files import ModelFiles
from tests.devices import BACKEND_PARAMS, load, settings_for
from tests.golden.classifiers import head_scores, hidden_states, tiny_classifier
from tests.golden.reference import tiny_model

PROMPTS = [[(7 * i * i + 3 * n) % 131 for i in range(n)] for n in (1, 2, 15, 16, 17, 40, 70)]
SIZES = {"kv_blocks": 64, "block_size": 8, "max_num_seqs": 8, "max_model_len": 128, "threads": 1}


def engine_of(files: ModelFiles, backend: str, *, step_tokens: int) -> Engine:
    fields = SIZES | {"max_num_batched_tokens": step_tokens, "dtype": "float32"}
    runner = load(backend, files, **fields)
    capacity = runner.capacity
    kv = make_cache(capacity, prefix_caching=True)
    return Engine(settings_for(backend, **fields), kv, runner, overlap=True)


def ask(engine: Engine, wanted: list[tuple[list[int], Pooling]]) -> list[npt.NDArray[np.float32]]:
    """All at once; the vectors in that order."""
    found: dict[int, bytes] = {}
    for handle, (prompt, pooling) in enumerate(wanted):
        engine.submit(0, Submit(handle, prompt, 0, pooling=pooling))
    while engine.has_work:
        for out in engine.turn().values():
            found |= {vector.handle: vector.values for vector in out.vectors}
            assert not any(done.error for done in out.dones), out.dones
    return [np.frombuffer(found[handle], "<f4") for handle in range(len(wanted))]


def close(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(np.abs(want).max()))


@pytest.mark.parametrize("backend", BACKEND_PARAMS)
@pytest.mark.parametrize("family", ["llama-gqa", "qwen2"])
def test_embeddings(family: str, backend: str, tmp_path: Path) -> None:
    model, files = tiny_model(family, tmp_path)
    wanted: list[tuple[list[int], Pooling]] = [(p, "mean") for p in PROMPTS]
    wanted += [(p, "last") for p in PROMPTS]
    states = [hidden_states(model, prompt) for prompt in PROMPTS]
    expected = [s.mean(0) for s in states] + [s[-1] for s in states]
    for step_tokens in (64, 9):
        engine = engine_of(files, backend, step_tokens=step_tokens)
        for _ in range(2):  # the second time "last" finds its prefix in the cache
            for got, want in zip(ask(engine, wanted), expected, strict=True):
                close(got, want)
        engine.close()


@pytest.mark.parametrize("backend", BACKEND_PARAMS)
@pytest.mark.parametrize(
    ("family", "labels"), [("llama", 3), ("llama", 1), ("mistral", 2), ("qwen2", 5)]
)
def test_scores(family: str, labels: int, backend: str, tmp_path: Path) -> None:
    model, files = tiny_classifier(family, tmp_path, labels)
    engine = engine_of(files, backend, step_tokens=20)
    capacity = engine.runner.capacity
    assert (capacity.labels, capacity.generates, capacity.width) == (labels, False, 48)
    wanted: list[tuple[list[int], Pooling]] = [(prompt, "scores") for prompt in PROMPTS]
    wanted.append((PROMPTS[-1], "mean"))
    expected = [head_scores(model, prompt) for prompt in PROMPTS]
    expected.append(hidden_states(model, PROMPTS[-1]).mean(0))
    for _ in range(2):
        for got, want in zip(ask(engine, wanted), expected, strict=True):
            close(got, want)
    engine.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma", "gemma2"])
def test_families_that_torch_computes(family: str, tmp_path: Path) -> None:
    """Norms of another kind, and windows: every vector of one model."""
    # Eager: not every transformers caps the scores of its other attentions.
    options = {"head_dim": 16, "sliding_window": 24, "attn_implementation": "eager"}
    model, files = tiny_classifier(family, tmp_path, 4, **options)
    engine = engine_of(files, "cpu", step_tokens=20)
    prompt = PROMPTS[-1]
    kinds: tuple[Pooling, ...] = ("scores", "mean", "last")
    scores, mean, last = ask(engine, [(prompt, kind) for kind in kinds])
    states = hidden_states(model, prompt)
    close(scores, head_scores(model, prompt))
    close(mean, states.mean(0))
    close(last, states[-1])
    engine.close()


def test_a_head_that_the_config_does_not_describe(tmp_path: Path) -> None:
    _, files = tiny_classifier("llama", tmp_path, 3)
    path = tmp_path / "config.json"
    config = msgspec.json.decode(path.read_bytes())
    assert read_card(files).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    del config["id2label"]  # then transformers takes two
    path.write_bytes(msgspec.json.encode(config))
    with pytest.raises(ModelError, match=r"score\.weight has shape \[3, 48\]"):
        load("cpu", files, **SIZES)
    config["id2label"] = {"1": "good", "2": "bad"}
    with pytest.raises(ModelError, match="id2label"):
        from_hf(config)
    config["id2label"], config["problem_type"] = {"1": "good", "0": "bad"}, "guessing"
    path.write_bytes(msgspec.json.encode(config))
    with pytest.raises(ModelError, match="problem_type = 'guessing'"):
        read_card(files)
    config["problem_type"] = "multi_label_classification"
    path.write_bytes(msgspec.json.encode(config))
    card = read_card(files)
    assert (card.labels, card.problem) == (("bad", "good"), "multi_label_classification")

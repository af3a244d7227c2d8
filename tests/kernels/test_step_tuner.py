"""The step tuner: a descent with a clock that is told what to say, scenes in the interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import _async_compile

from benchmarks.kernels import step
from benchmarks.kernels.candidates import SHARED_BYTES, neighbours, shortlist, switches
from benchmarks.kernels.descent import LONG, Choices, Descent, Unfit, gains
from benchmarks.kernels.scene import Scene, SceneTimer, weight_bytes
from headrace.backends.cuda.device import Card
from headrace.config import Settings
from headrace.kernels.attention_configs import DecodeConfig
from headrace.kernels.launch import compiling
from headrace.kernels.product import Config, shared_bytes
from headrace.kernels.tuned import (
    KINDS,
    Decoding,
    Heads,
    card_file,
    choose,
    choose_decoding,
    decode_entry,
    default_decoding,
    entry,
)
from headrace.runner.build import read_facts
from headrace.runner.weights import load_model
from headrace.sources.files import ModelFiles
from tests.golden.reference import tiny_model
from tests.kernels.conftest import CUDA

CONFIG = Config(32, 256, 4, 5, prefetch_bytes=32768)
HEADS = Heads(40, 8, 128)


class Told:
    """A timer of sums: cost[name][value], with a jitter that comes in turns."""

    def __init__(self, costs: dict[str, dict[Any, float]], jitter: float = 0.0) -> None:
        self.costs, self.jitter, self.calls = costs, jitter, 0

    def __call__(self, choices: Choices, name: str, replays: int) -> float:
        self.calls += 1
        if "broken" in choices.values():
            raise Unfit("told so")
        return sum(self.costs[n][v] for n, v in choices.items()) + self.jitter * (self.calls % 3)


def silent(line: str) -> None:
    pass


def test_the_fastest_of_each_choice_is_kept() -> None:
    told = Told({"a": {1: 3.0, 2: 2.0, 3: 2.5}, "b": {1: 1.0, 2: 1.5}})
    descent = Descent(told, {"a": 1, "b": 1}, say=silent)
    assert descent.visit("a", [1, 2, "broken", 3])
    assert not descent.visit("b", [2])
    assert descent.choices == {"a": 2, "b": 1}
    assert descent.tried == told.calls


def test_a_gain_within_the_noise_is_none() -> None:
    costs = {"a": {1: 10.0, 2: 9.95}}
    assert Descent(Told(costs), {"a": 1}, say=silent).visit("a", [2])
    assert not Descent(Told(costs, jitter=0.1), {"a": 1}, say=silent).visit("a", [2])
    assert not gains([10.0, 10.0], [9.999, 9.999]), "less than any clock sees"


def test_no_more_is_tried_when_the_time_is_up() -> None:
    seconds = iter([0.0, 1.0, 2.0, 3.0])
    told = Told({"a": {1: 3.0, 2: 2.0, 3: 1.0}})
    descent = Descent(told, {"a": 1}, until_s=0.5, clock=lambda: next(seconds), say=silent)
    assert descent.visit("a", [2, 3])
    assert descent.choices == {"a": 2}, "3 came too late"
    assert descent.late()


def test_what_stands_must_run() -> None:
    with pytest.raises(Unfit):
        Descent(Told({}), {"a": "broken"}, say=silent).visit("a", [1])


@pytest.mark.parametrize("bucket", [16, 32, 64, 128])
def test_shortlists(bucket: int) -> None:
    near = neighbours(CONFIG, bucket, 7168, 5120)
    assert len(near) == len(set(near)) >= 1
    assert CONFIG not in near
    made = shortlist(CONFIG, bucket, 7168, 5120, most=24)
    assert made[0] is None
    assert len(set(made)) == len(made) == 24
    for config in made[1:]:
        assert config is not None
        assert shared_bytes(config, bucket) < SHARED_BYTES
    assert None in shortlist(None, bucket, 5120, 5120, most=24)


def test_switches() -> None:
    assert len(set(switches(CONFIG, folds=True))) == 10
    apart = switches(CONFIG, folds=False)
    assert len(set(apart)) == 5
    assert all(config.fold_norm for config in apart)


def test_merged_files_are_chosen_from(tmp_path: Path) -> None:
    parts = []
    for bucket, chosen in ((16, CONFIG), (32, None)):
        decoding = Decoding(DecodeConfig(32, 4, 3), bucket)
        made = {
            "card": "Card X",
            "entries": [entry("qkv", 7168, 5120, bucket, chosen)],
            "decode": [decode_entry(HEADS, bucket, decoding)],
        }
        parts.append(tmp_path / f"step-{bucket}.json")
        parts[-1].write_text(json.dumps(made))
    path = card_file("Card X", tmp_path)
    old = [entry("qkv", 7168, 5120, 16, None), entry("out", 5120, 5120, 16, CONFIG)]
    path.write_text(json.dumps({"card": "Card X", "entries": old, "chain": 1}))
    assert step.merge(parts, tmp_path) == [path, path]
    assert choose("qkv", 3, 7168, 5120, "Card X", folder=tmp_path) == CONFIG
    assert choose("qkv", 32, 7168, 5120, "Card X", folder=tmp_path) is None
    assert choose("out", 1, 5120, 5120, "Card X", folder=tmp_path) == CONFIG
    assert json.loads(path.read_text())["chain"] == 1

    def decoding_of(tokens: int, dtype: torch.dtype) -> Decoding:
        return choose_decoding(tokens, HEADS, dtype, 132, "Card X", folder=tmp_path)

    assert decoding_of(3, torch.bfloat16) == Decoding(DecodeConfig(32, 4, 3), 16)
    assert decoding_of(17, torch.float16).splits == 32
    for tokens, dtype in ((3, torch.float32), (40, torch.bfloat16), (500, torch.bfloat16)):
        assert decoding_of(tokens, dtype) == default_decoding(tokens, HEADS, dtype, 132)


def scene(folder: Path, choices: dict[str, Any], tokens: int) -> Scene:
    tiny_model("llama-gqa", folder)
    settings = Settings(load_format="dummy", dtype="float32")
    facts = read_facts(settings, ModelFiles("tiny", "hf", folder))
    device = torch.device("cuda" if CUDA else "cpu")
    model = load_model(facts.spec, None, torch.float32, device)
    capability = (9, 0) if CUDA else (0, 0)
    return Scene(model, Card("none", 0, 1, capability), tokens, 20, choices)


PLAIN = Config(block_n=16, block_k=32, warps=1, stages=2)
DECODING = Decoding(DecodeConfig(16, 1, 2), 1)
OURS: dict[str, Any] = {**dict.fromkeys(KINDS, PLAIN), "decode": DECODING}
LIBRARY: dict[str, Any] = {**dict.fromkeys(KINDS), "decode": DECODING}


def test_a_scene_runs_the_model_with_the_choices_it_is_given(tmp_path: Path) -> None:
    made = scene(tmp_path, OURS, 2)
    asked: list[str] = []
    place = made._forward.place
    whole: Callable[..., Config | None] = place.choose

    def listening(kind: str, m: int, n: int, k: int) -> Config | None:
        asked.append(kind)
        return whole(kind, m, n, k)

    object.__setattr__(place, "choose", listening)
    ours, theirs = made.logits(9, OURS), made.logits(9, LIBRARY)
    assert set(asked) == set(KINDS)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    assert not torch.equal(ours[0], ours[1]), "rows are sequences of their own"
    assert (
        weight_bytes(made._model)
        == sum(p.numel() * 4 for p in made._model.parameters())
        - made._model.embed.weight.numel() * 4
        - made._model.norm.weight.numel() * 4
    )


def test_a_timer_asks_every_scene_at_its_contexts(tmp_path: Path) -> None:
    made = scene(tmp_path, LIBRARY, 1)
    timer = SceneTimer([made], lambda tokens, name: [3, 17] if name == "decode" else [3])
    each = timer.each(LIBRARY, "decode", 2)
    assert set(each) == {1}
    assert len(each[1]) == 2
    assert min(each[1]) > 0
    assert timer(LIBRARY, "qkv", 1) > 0
    with pytest.raises(AssertionError, match="room for"):
        made.times_ms([3], LONG * 20)


def test_what_does_not_compile_stops_no_other_candidate() -> None:
    def broken() -> None:
        raise RuntimeError("PassManager::run failed")

    for _ in range(2):  # the first leaves nothing behind
        with compiling(1, trying=True):
            mode = _async_compile.active_mode.get()
            assert mode is not None
            kernel = mode.submit("key", broken, lambda kernel: None)
        with pytest.raises(RuntimeError, match="PassManager"):
            kernel.result()

"""The arithmetic of the GPU benchmarks: bytes, FLOPs, limits, rows."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from benchmarks.gpu import peer_dummy, timeline
from benchmarks.gpu.drive import (
    Clock,
    Rows,
    figure,
    limits_row,
    process_age_s,
    prompts,
    read_limits,
    run_works,
)
from benchmarks.gpu.shapes import shape_of, write_folder
from benchmarks.gpu.work import ALL, Limits, Work, limit_s
from headrace.models.shape import Shape

# 4 wide, an MLP of 6, two heads of 2, one of K and V
TOY = Shape(
    name="toy",
    vocab=10,
    layers=2,
    layer_weights=240,
    head_weights=40,
    kv_elements=8,
    pair_mults=8,
)
LIMITS = Limits(read_bytes=1000.0, copy_bytes=900.0, flops=1e5)


def test_bytes_of_the_14b() -> None:
    shape = shape_of("qwen2.5-14b")
    assert shape.weight_bytes == pytest.approx(28.0e9, rel=0.01)
    assert shape.kv_token_bytes == 196_608


def test_limit_of_a_work_is_the_sum_of_its_steps() -> None:
    wave = Work("wave", 3, prompt_tokens=2, output_tokens=3)
    steps = [(6, 0, 9), (3, 9, 9), (3, 12, 12)]  # tokens, KV tokens read, pairs
    wanted = sum(
        max(TOY.step_bytes(kv) / 1000.0, TOY.step_flops(tokens, 3, pairs) / 1e5)
        for tokens, kv, pairs in steps
    )
    assert limit_s(wave, TOY, LIMITS) == pytest.approx(wanted)


def test_limits_of_the_card_are_what_is_known_of_it() -> None:
    """28.0 GB at 4.48 TB/s is 6.25 ms a step; 2048 prompt tokens are 0.06 PFLOP."""
    limits = Limits(read_bytes=4.48e12, copy_bytes=4.1e12, flops=770e12)
    shape = shape_of("qwen2.5-14b")
    by_name = {work.name: work for work in ALL}
    assert limit_s(by_name["wave 1x(32->75)"], shape, limits) / 75 == pytest.approx(
        6.25e-3, rel=0.01
    )
    prefill_s = limit_s(by_name["prefill 1x(2048->1)"], shape, limits)
    assert prefill_s == pytest.approx(0.0729, rel=0.02)


def test_a_figure() -> None:
    work = Work("wave", 2, 4, 5)
    row = figure(work, [2.0, 1.0, 4.0], TOY, LIMITS)
    assert (row["seconds"], row["tok_s"], row["ms_per_token"]) == (2.0, 5.0, 400.0)
    assert row["fraction"] == pytest.approx(limit_s(work, TOY, LIMITS) / 2.0)
    assert row["spread"] == 1.5
    assert figure(Work("prefill", 2, 4, 1), [2.0], TOY, None)["tok_s"] == 4.0
    assert read_limits(limits_row(LIMITS)) == LIMITS


def test_works_without_time_are_named_and_failures_go_on(tmp_path: Path) -> None:
    rows, clock = Rows(tmp_path / "rows.jsonl", engine="x"), Clock(0)
    works = [Work("wave", 1, 3, 2, runs=2), Work("wave", 2, 3, 2), Work("wave", 3, 3, 2)]
    seen: list[tuple[int, int, int, float]] = []

    def generate(given: list[list[int]], tokens: int, temperature: float) -> None:
        seen.append((len(given), len(given[0]), tokens, temperature))
        if len(given) == 2:
            clock._end_s = 0.0
            raise MemoryError("full")

    run_works(generate, works, TOY, LIMITS, clock, rows)
    assert seen == [(8, 32, 16, 0.0), (1, 3, 2, 0.0), (1, 3, 2, 0.0), (2, 3, 2, 0.0)]
    said = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["engine"] for row in said] == ["x"] * 3
    assert said[0]["runs"] == 2
    assert said[1]["failed"] == "MemoryError: full"
    assert said[2]["skipped"] == ["wave 3x(3->2)"]


def test_prompts_are_distinct_and_inside_the_vocabulary() -> None:
    import random

    many = prompts(random.Random(1), Work("wave", 50, 8, 1), 1000)
    assert len({tuple(prompt) for prompt in many}) == 50
    assert all(10 <= token < 666 for prompt in many for token in prompt)


def test_age_of_this_process() -> None:
    first = process_age_s()
    assert 0 < first < process_age_s() < 86400


def test_folders(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    bare = write_folder("tiny", tmp_path)
    assert [path.name for path in bare.iterdir()] == ["config.json"]
    with_text = write_folder("tiny", tmp_path, tokenizer=True)
    made = Tokenizer.from_file(str(with_text / "tokenizer.json"))
    assert made.get_vocab_size() == 1024
    assert made.encode("abc").ids == [made.token_to_id(c) for c in "abc"]
    texts = [made.decode([i]) for i in range(256, 1024)]
    assert len(set(texts)) == len(texts), "every id has a text of its own"


def test_the_peer_finds_the_plug_in(tmp_path: Path) -> None:
    paths = peer_dummy.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
    (found,) = importlib.metadata.distributions(path=paths[:1])
    (entry,) = found.entry_points
    assert entry.group == "vllm.general_plugins"
    assert entry.load() is peer_dummy.register


def test_the_peer_draws_as_headrace_does() -> None:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(7, bias=False)
            self.linear = torch.nn.Linear(100, 200)

    model = Model()
    peer_dummy.fill(model)
    assert (model.norm.weight == 1).all()
    assert model.linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    first = model.linear.weight.clone()
    peer_dummy.fill(model)
    assert torch.equal(first, model.linear.weight)


def test_mixtures_count_what_one_token_reads() -> None:
    lite, qwen = shape_of("deepseek-v2-lite"), shape_of("qwen3-30b-a3b")
    assert lite.weight_bytes == pytest.approx(4.8e9, rel=0.05)
    assert lite.kv_token_bytes == 27 * 576 * 2
    assert qwen.weight_bytes == pytest.approx(6.1e9, rel=0.05)


def test_a_layer_of_a_profile_is_shown_by_when_its_kernels_end() -> None:
    events, at = [], 100.0
    for _ in range(3):  # steps of 4 layers; kernels of dependent launches begin before their turn
        for _ in range(4):
            for name, took in (("_decode_kernel", 3.0), ("linear_kernel", 5.0)):
                args = {"grid": [8, 1, 1], "shared memory": 2048}
                events.append({"cat": "kernel", "name": name, "ts": at - 2, "dur": took + 2,
                               "args": args})  # fmt: skip
                at += took
        head = {"cat": "kernel", "name": "linear_kernel", "ts": at, "dur": 9.0}
        events.append(head | {"args": {"grid": [99, 1, 1]}})
        at += 9.0
    events.append({"cat": "user_annotation", "name": "ignored", "ts": 0, "dur": 1})
    kernels = timeline.kernels_of({"traceEvents": events})
    layers = timeline.layers_of(kernels, "_decode_kernel")
    assert len(layers) == 8  # the first of all has nothing before it, each step's last has the head
    shown = [(line.name, line.took, line.adds) for line in timeline.lines_of(layers)]
    assert shown == [("_decode_kernel", 5.0, 3.0), ("linear_kernel", 7.0, 5.0)]

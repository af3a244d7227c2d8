"""What `auto` comes to, with its reason, and what the ledger prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.accelerators import Accelerator
from headrace.backends.choose import settled
from headrace.backends.cpu import device
from headrace.config import Resolved, Settings
from headrace.errors import ConfigError
from headrace.inspection import inspect
from headrace.kv.groups import GroupedCache
from headrace.kv.room import most_held
from headrace.models.kv_layout import layout_of
from headrace.models.spec import ModelSpec, Rope, from_hf
from headrace.planning import Planner
from headrace.runner import ledger
from headrace.runner.build import explain, load_runner
from headrace.runner.runner import CpuRunner
from headrace.sources.files import ModelFiles
from tests.unit.test_inspect import GEMMA3, folder

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=8,
    ffn=128,
    vocab_rows=100,
    vocab_size=100,
    rope=Rope(),
    norm_eps=1e-5,
    tied=True,
    qkv_bias=False,
    max_positions=1000,
)
TOKEN_BYTES = 2 * 4 * 2 * 8 * 4
MANY = 1 << 40


def cpu(**keys: Any) -> Settings:
    """Settled settings of the cpu backend."""
    return settled(Settings(backend="cpu", **keys))


def test_kv_bytes_are_what_a_block_takes() -> None:
    assert ledger.kv_block_bytes(SPEC, layout_of(SPEC), "float32", 1) == TOKEN_BYTES
    assert ledger.kv_block_bytes(SPEC, layout_of(SPEC), "bfloat16", 1) == TOKEN_BYTES // 2


def test_kv_blocks_as_asked() -> None:
    found = ledger.size_kv(Settings(kv_blocks=7), SPEC, "float32", free_bytes=0)
    assert found == Resolved(7, "asked for")


def test_kv_memory_is_filled_and_not_passed() -> None:
    settings = Settings(kv_memory="1MB", block_size=4)
    found = ledger.size_kv(settings, SPEC, "float32", free_bytes=0)
    assert found.value == 1_000_000 // (4 * TOKEN_BYTES)
    assert "1MB" in found.reason


def test_a_quarter_of_free_memory() -> None:
    found = ledger.size_kv(cpu(), SPEC, "float32", free_bytes=2**24)
    assert found.value == 2**22 // (16 * TOKEN_BYTES)
    assert "a quarter of 16.0 MiB" in found.reason


def test_no_more_than_the_rows_can_fill() -> None:
    settings = Settings(max_num_seqs=3, max_model_len=100, max_num_batched_tokens=8)
    found = ledger.size_kv(settings, SPEC, "float32", free_bytes=MANY)
    assert found.value == 3 * (7 + 1), "seven blocks of 16 hold 100 tokens, one is spare"
    assert "3 sequences" in found.reason


def test_memory_for_no_block_is_an_error() -> None:
    with pytest.raises(ConfigError, match="kv_memory = 100B holds no KV block") as caught:
        ledger.size_kv(Settings(kv_memory="100B"), SPEC, "float32", free_bytes=MANY)
    assert caught.value.param == "kv_memory"
    with pytest.raises(ConfigError, match="holds no KV block"):
        ledger.size_kv(Settings(), SPEC, "float32", free_bytes=1000)


def test_the_smallest_of_three_lengths_with_its_reason() -> None:
    by_model = ledger.wanted_model_len(Settings(), SPEC)
    by_setting = ledger.wanted_model_len(Settings(max_model_len=500), SPEC)
    assert by_model == Resolved(1000, "the model's positions")
    assert by_setting == Resolved(500, "asked for")
    assert ledger.fit_model_len(by_setting, 100, 16) == by_setting
    assert ledger.fit_model_len(by_setting, 10, 16) == Resolved(160, "the KV cache holds no more")


def test_layers_with_a_window_take_no_more_than_it() -> None:
    """The table of docs/models.md: 3 layers of Gemma-3-270M keep all, 15 keep 512 tokens."""
    spec = from_hf(GEMMA3)
    layout = layout_of(spec)
    assert layout.windows == (0, *[512] * 5)
    settings = Settings(kv_memory="1GiB", max_num_seqs=256)
    blocks = ledger.size_kv(settings, spec, "bfloat16", free_bytes=0).value
    assert blocks == 2**30 // (16 * 3 * 1024)
    held = [most_held(layout.windows, 16, n // 16) for n in (512, 2048, 8192, 32768)]
    assert [blocks // one for one in held] == [113, 73, 32, 9]
    line = ledger.kv_line(spec, layout, "bfloat16", 16, Resolved(blocks, "as set"))
    assert line.size_bytes == blocks * 16 * 3 * 1024
    assert "21845 blocks of 16 tokens in 3 layers, 6 groups of them, 58240 tokens" in line.note
    wanted = Resolved(32768, "the model's positions")
    assert ledger.fit_model_len(wanted, 2048 + 5 * 34, 16, layout.windows) == wanted
    with pytest.raises(ConfigError, match="takes 6 at least") as refused:
        ledger.fit_model_len(wanted, 5, 16, layout.windows)
    assert refused.value.param == "kv_blocks"
    short = ledger.fit_model_len(wanted, 2048 + 5 * 34 - 1, 16, layout.windows)
    assert short.value == 32768 - 16


@pytest.mark.parametrize("layers", [18, 34])
def test_all_say_the_same_of_how_many_tokens_fit(tmp_path: Path, layers: int) -> None:
    """`inspect`, `plan`, and what a server says of its cache, to the last block. 34 layers are
    seven groups of five, and there is room for one layer more."""
    config = GEMMA3 | {"num_hidden_layers": layers, "layer_types": GEMMA3["layer_types"] * 2}
    config["layer_types"] = config["layer_types"][:layers]
    spec, files = from_hf(config), folder(tmp_path, config)
    fit = next(fit for fit in inspect(files, 2 * 10**9, 8192).fits if fit.weights == "bfloat16")
    layout = layout_of(spec)
    settings = Settings(kv_memory=f"{fit.kv_bytes}B")
    blocks = ledger.size_kv(settings, spec, "bfloat16", free_bytes=0).value
    kv = GroupedCache(blocks, 16, windows=layout.windows)
    assert 0 <= fit.tokens - kv.kept_tokens < 16
    card = Accelerator("c", 2 * 10**9, 10**12, 10**14, "test")
    plan = Planner(files, card, weights="bfloat16", utilization=1.0).plan([8192], [1], [8])
    assert (plan.kv_bytes, plan.kv_tokens) == (fit.kv_bytes, fit.tokens)
    assert [room.sequences for room in plan.rooms] == [fit.sequences]
    rounded = most_held(layout.windows, 16, 8192 // 16)
    assert fit.sequences >= blocks // rounded >= fit.sequences * 0.9


def test_rows_that_fill_a_cache_with_windows() -> None:
    """Two sequences of 2000 tokens, a spare block each, and two chunks in the groups with one."""
    settings = Settings(max_num_seqs=2, max_model_len=2000, max_num_batched_tokens=64)
    found = ledger.size_kv(settings, from_hf(GEMMA3), "bfloat16", free_bytes=MANY)
    assert found.value == 2 * (126 + 5 * 34) + 5 * 8


def test_more_than_the_models_positions_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len = 1001: the model has 1000") as caught:
        ledger.wanted_model_len(Settings(max_model_len=1001), SPEC)
    assert caught.value.param == "max_model_len"


@pytest.mark.parametrize(
    ("asked", "stored", "flags", "dtype", "reason"),
    [
        ("auto", {"bfloat16"}, {"avx512_vnni"}, "float32", "no native bfloat16"),
        ("auto", {"bfloat16"}, {"avx512_bf16"}, "bfloat16", "avx512_bf16"),
        ("auto", {"Q4_1", "Q8_0"}, {"amx_bf16"}, "bfloat16", "amx_bf16"),
        ("auto", {"float32"}, {"amx_bf16"}, "float32", "the checkpoint is float32"),
        ("bfloat16", {"float32"}, {"amx_bf16"}, "bfloat16", "asked for"),
        ("bfloat16", {"float32"}, set(), "bfloat16", "slow"),
        ("float16", {"bfloat16"}, set(), "float16", "asked for"),
        ("float32", {"bfloat16"}, {"amx_bf16"}, "float32", "asked for"),
    ],
)
def test_dtype(asked: str, stored: set[str], flags: set[str], dtype: str, reason: str) -> None:
    settings = Settings(dtype=asked)  # type: ignore[arg-type]
    found = ledger.resolve_dtype(settings, stored, frozenset(flags))
    assert found.value == dtype
    assert reason in found.reason


def test_free_memory_heeds_the_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2000 kB\nMemAvailable:  1000 kB\n")
    assert device.free_memory_bytes(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.current").write_text("500\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert device.free_memory_bytes(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("700\n")
    assert device.free_memory_bytes(meminfo, tmp_path) == 200
    assert device.free_memory_bytes(tmp_path / "none", tmp_path) > 2**27


def dummy(folder: Path) -> ModelFiles:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelFiles("dummy", "hf", folder)


def test_a_loaded_runner_says_what_it_is(tmp_path: Path) -> None:
    settings = cpu(load_format="dummy", kv_blocks=3, max_num_seqs=5, dtype="float16")
    phases = []
    runner, info = load_runner(settings, dummy(tmp_path), lambda name, s: phases.append((name, s)))
    assert runner.capacity == info.capacity
    assert info.capacity.max_rows == 5
    assert info.capacity.max_model_len == 48
    assert info.capacity.kv_blocks == [3]
    assert info.dtype == Resolved("float16", "asked for")
    assert [name for name, _ in phases][-1] == "measure the parts of a step"
    assert len(phases) == 5
    assert all(seconds >= 0 for _, seconds in phases)
    text = "\n".join(info.ledger)
    layer = 32 * 32 * 4 + 3 * 32 * 64 + 2 * 32
    assert f"{(2 * layer + 40 * 32 + 32) / 1e6:.1f} M parameters" in text
    assert "3 blocks, 48 tokens of 256 bytes: asked for" in text
    assert "48 tokens: the KV cache holds no more" in text
    assert "float16: asked for" in text
    runner.close()


@pytest.mark.parametrize("more", [{"kv_memory": "20kB"}, {"kv_blocks": 3}, {"max_num_seqs": 2}])
def test_what_is_told_before_loading_comes_true(tmp_path: Path, more: dict[str, object]) -> None:
    settings = cpu(load_format="dummy", **more)
    files = dummy(tmp_path)
    told = explain(settings, files)
    runner, info = load_runner(settings, files, lambda name, s: None)
    runner.close()
    assert told == {
        "dtype": info.dtype,
        "kv_blocks": info.kv_blocks,
        "max_model_len": info.max_model_len,
    }


def test_settings_that_cannot_be_met(tmp_path: Path) -> None:
    files = dummy(tmp_path)

    def load(**keys: object) -> None:
        load_runner(cpu(load_format="dummy", **keys), files, lambda name, s: None)

    with pytest.raises(ConfigError, match="max_model_len = 65"):
        load(max_model_len=65)
    with pytest.raises(ConfigError, match="kv_memory"):
        load(kv_memory="1B")


def test_the_thread_setting_reaches_the_worker(tmp_path: Path) -> None:
    runner, _ = load_runner(
        cpu(load_format="dummy", kv_blocks=2, threads=3, cpu_kernels="torch"),
        dummy(tmp_path),
        lambda name, s: None,
    )
    assert isinstance(runner, CpuRunner)
    assert runner.worker.submit(torch.get_num_threads).result() == 3
    runner.close()

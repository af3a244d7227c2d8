"""Folders of weights: parts of a checkpoint, pickles, values that are not finite, memory."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.backends.choose import settled
from headrace.config import Settings, load
from headrace.errors import ConfigError, ModelError
from headrace.runner.build import load_runner
from headrace.runner.checkpoint import Checkpoint, open_checkpoint
from headrace.runner.named import fold
from headrace.sources.files import ModelFiles
from headrace.sources.resolve import resolve
from tests.backend.test_weights import hf_folder
from tests.golden import families

INDEX = "model.safetensors.index.json"
PARTS = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.ones(4), "c": torch.zeros(2, 2, 2)}


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {
        name: checkpoint.read(name, 0, one.shape[0]) for name, one in checkpoint.tensors.items()
    }


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def folder(path: Path) -> ModelFiles:
    return ModelFiles("tiny", "hf", path)


# ---------------------------------------------------------------- parts


def test_rows_are_those_of_the_file(tmp_path: Path) -> None:
    save_file(PARTS, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(folder(tmp_path))
    assert same(read_all(checkpoint), PARTS)
    assert torch.equal(checkpoint.read("a", 1, 3), PARTS["a"][1:3])
    assert checkpoint.read("c", 1, 1).shape == (0, 2, 2)


def test_numbered_parts_need_no_index(tmp_path: Path) -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save_file({"a": PARTS["a"]}, tmp_path / names[0])
    with pytest.raises(ModelError, match=f"lacks {names[1]}"):
        open_checkpoint(folder(tmp_path))
    save_file({"b": PARTS["b"], "c": PARTS["c"]}, tmp_path / names[1])
    assert same(read_all(open_checkpoint(folder(tmp_path))), PARTS)
    save_file({"a": PARTS["a"], "b": PARTS["b"]}, tmp_path / names[1])
    with pytest.raises(ModelError, match="another file holds too: a"):
        open_checkpoint(folder(tmp_path))
    save_file({"a": PARTS["a"]}, tmp_path / "model-00001-of-00003.safetensors")
    with pytest.raises(ModelError, match="several checkpoints"):
        open_checkpoint(folder(tmp_path))


def test_the_index_says_whose_tensor_counts(tmp_path: Path) -> None:
    stale = {"a": torch.full((3, 2), 9.0), "b": PARTS["b"]}
    save_file({"a": PARTS["a"], "c": PARTS["c"]}, tmp_path / "1.safetensors")
    save_file(stale, tmp_path / "2.safetensors")
    index = {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    assert same(read_all(open_checkpoint(folder(tmp_path))), PARTS)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**index, "d": "2.safetensors"}}))
    with pytest.raises(ModelError, match=r"2\.safetensors lacks tensors .* there: d"):
        open_checkpoint(folder(tmp_path))


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    save_file(PARTS, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(folder(tmp_path))
    size = (tmp_path / "model.safetensors").stat().st_size
    os.truncate(tmp_path / "model.safetensors", size - 8)
    with pytest.raises(ModelError, match="was cut while it was read"):
        read_all(checkpoint)


def test_all_misfits_are_named_at_once(tmp_path: Path) -> None:
    files, tensors = hf_folder(tmp_path, num_hidden_layers=12)
    for i in (*range(5), 7):
        del tensors[f"model.layers.{i}.self_attn.k_proj.weight"]
    tensors |= {"model.layers.9.extra": torch.zeros(1), "other": torch.zeros(1)}
    for i in range(2, 12):
        tensors[f"model.layers.{i}.mlp.up_proj.weight"] = torch.zeros(3, 4)
    tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_runner(cpu(), files, lambda name, seconds: None)
    for part in (
        "6 missing: model.layers.{0-4,7}.self_attn.k_proj.weight;",
        "2 unexpected: model.layers.9.extra, other;",
        "model.layers.{2-11}.mlp.up_proj.weight has shape [3, 4], the config asks [64, 32]",
        "model.norm.weight is of type I32, which is not supported",
    ):
        assert part in caught.value.message


def test_names_are_folded() -> None:
    assert fold(["h.2.b", "h.0.b", "h.1.b", "h.1.c", "d"]) == "d, h.{0-2}.b, h.1.c"
    assert fold(["x.1.e.0.w", "x.1.e.1.w", "x.3.e.0.w"]) == "x.{1,3}.e.0.w, x.1.e.1.w"


# ---------------------------------------------------------------- pickles


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def cpu(**more: Any) -> Settings:
    fields: dict[str, Any] = {"kv_blocks": 8, "cpu_kernels": "torch", "dtype": "float32"}
    return settled(Settings(backend="cpu", **(fields | more)))


def test_pickles_are_read_if_allowed(tmp_path: Path) -> None:
    torch.save(PARTS, tmp_path / "pytorch_model.bin")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=r"model\.safetensors is missing; .*--allow-pickle"):
        resolve(str(tmp_path), say=print)
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        open_checkpoint(folder(tmp_path))
    files = resolve(str(tmp_path), say=print, pickles=True)
    assert same(read_all(open_checkpoint(files, allow_pickle=True)), PARTS)
    torch.save(PARTS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(read_all(open_checkpoint(files, allow_pickle=True)), PARTS)
    save_file({"s": PARTS["a"]}, tmp_path / "model.safetensors")
    assert set(open_checkpoint(files, allow_pickle=True).tensors) == {"s"}, "safetensors come first"


def test_parts_that_are_pickles(tmp_path: Path) -> None:
    torch.save({"a": PARTS["a"]}, tmp_path / "pytorch_model-1.bin")
    torch.save({"b": PARTS["b"], "c": PARTS["c"]}, tmp_path / "pytorch_model-2.bin")
    index = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin", "c": "pytorch_model-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert same(read_all(open_checkpoint(folder(tmp_path), allow_pickle=True)), PARTS)


@pytest.mark.parametrize("how", ["torch", "pickle", "nested", "list", "cut"])
def test_a_pickle_runs_nothing(tmp_path: Path, how: str) -> None:
    path, made = tmp_path / "pytorch_model.bin", tmp_path / "made"
    if how == "torch":
        torch.save({"a": PARTS["a"], "trap": Trap(made)}, path)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Trap(made), protocol=2))
    elif how == "nested":
        torch.save({"state_dict": PARTS}, path)
    elif how == "list":
        torch.save([PARTS["a"]], path)
    else:
        torch.save(PARTS, path)
        path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        open_checkpoint(folder(tmp_path), allow_pickle=True)
    assert not made.exists()


def test_a_model_out_of_pickles(tmp_path: Path) -> None:
    files, tensors = hf_folder(tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    for kernels in ("torch", "auto"):
        settings = cpu(allow_pickle=True, cpu_kernels=kernels)
        runner, _ = load_runner(settings, files, lambda name, seconds: None)
        runner.close()


# ---------------------------------------------------------------- values


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    files, tensors = hf_folder(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    said: list[str] = []
    runner, _ = load_runner(cpu(check_weights=True), files, lambda name, seconds: said.append(name))
    runner.close()
    assert "check weights" in said
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    tensors["model.layers.0.mlp.up_proj.weight"][0, :2] = -torch.inf
    tensors["model.norm.weight"][5] = 1e5
    save_file(tensors, tmp_path / "model.safetensors")
    for dtype, words in (
        ("float32", "3 weights are NaN or infinite as float32, in model.layers.{0-1}.mlp.up_proj"),
        ("float16", "4 weights are NaN or infinite as float16, in model.layers.{0-1}.mlp.up_proj"),
    ):
        settings = cpu(check_weights=True, dtype=dtype)
        with pytest.raises(ModelError) as caught:
            load_runner(settings, files, lambda name, seconds: None)
        assert words in caught.value.message
        assert ("model.norm.weight" in caught.value.message) == (dtype == "float16")
    with pytest.raises(ConfigError, match="check_weights"):
        load({"check_weights": True, "load_format": "dummy"}, {})


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [((4, 96, 2, 16), (4, 96, 1)), ((4, 96, 32), (4, 96, 2)), ((4, 96, 2, 8), (4, 96, 2))],
    ids=["too-few-scales", "blocks-of-three-axes", "half-a-block"],
)
def test_packed_blocks_of_another_shape_are_named(
    tmp_path: Path, blocks: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    """MXFP4 in a stranger's file: what the derived tensor is made of may have any shape."""
    _, files = families.save("gpt-oss", tmp_path, hidden_size=64, intermediate_size=48)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert tensors.pop(name).shape == (4, 64, 96)
    tensors[name + "_blocks"] = torch.zeros(blocks, dtype=torch.uint8)
    tensors[name + "_scales"] = torch.zeros(scales, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(name)):
        load_runner(cpu(), files, lambda name, seconds: None)


# ---------------------------------------------------------------- memory

# Run by itself: its highest memory is that of loading. Every page of an earlier one would count.
MEASURE = """
import sys
from pathlib import Path
from headrace.backends.choose import settled
from headrace.config import Settings
from headrace.runner.build import load_runner
from headrace.sources.files import ModelFiles

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[key].split()[0]) * 1024

import torch
torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
files = ModelFiles("model", "hf", Path(sys.argv[1]))
settings = settled(Settings(
    backend="cpu", kv_blocks=1, max_num_seqs=1, cpu_kernels="torch", dtype="float32", block_size=1,
    max_num_batched_tokens=1,
))
before = status("VmRSS")
runner, info = load_runner(settings, files, lambda name, seconds: None)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc/self/status")
def test_the_peak_is_the_model_and_little_more(tmp_path: Path) -> None:
    """Under 1.2 x the largest part beside the model; here all but a fraction of that is spare."""
    files, tensors = hf_folder(
        tmp_path, hidden_size=512, intermediate_size=2048, vocab_size=16000, num_hidden_layers=8
    )
    names, sizes = list(tensors), []
    index: dict[str, str] = {}
    for i in range(2):
        part = {name: tensors[name].bfloat16() for name in names[i::2]}
        index |= dict.fromkeys(part, f"{i}.safetensors")
        save_file(part, tmp_path / f"{i}.safetensors")
        sizes.append((tmp_path / f"{i}.safetensors").stat().st_size)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    command = [sys.executable, "-c", MEASURE, str(files.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    model = sum(tensor.numel() for tensor in tensors.values()) * 4
    assert int(done.stdout) < model + 1.2 * max(sizes), f"{max(sizes)} of {sum(sizes)}"


# ---------------------------------------------------------------- dummy


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_dummy_weights_for_every_family(tmp_path: Path, name: str) -> None:
    _, files = families.save(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    runner, info = load_runner(cpu(load_format="dummy"), files, lambda name, seconds: None)
    assert info.capacity.kv_blocks == [8]
    runner.close()

"""Checkpoints: dequantised to the bit, folded into the right rows, and refused by name."""

from __future__ import annotations

import json
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from headrace.backends.choose import settled
from headrace.config import Settings
from headrace.errors import ModelError
from headrace.models.registry import module_of
from headrace.models.slots import head_order
from headrace.models.spec import ModelSpec, read_spec
from headrace.quant import ggml
from headrace.runner import pieces
from headrace.runner.build import load_runner
from headrace.runner.checkpoint import GgufFile, bytes_of, dtypes_of, open_checkpoint
from headrace.runner.pieces import ordered
from headrace.runner.upload import upload
from headrace.runner.weights import load_model
from headrace.sources.files import ModelFiles

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def tensors_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    slots = module_of(spec.architecture).slots(spec)
    shapes = {slot.hf: slot.stored_shape(gguf=False) for slot in slots}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def hf_folder(folder: Path, **changes: Any) -> tuple[ModelFiles, dict[str, torch.Tensor]]:
    """A folder with config.json, and the tensors that fit it."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    files = ModelFiles("tiny", "hf", folder)
    return files, tensors_of(read_spec(files))


def load(files: ModelFiles, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(read_spec(files), open_checkpoint(files), dtype)


def test_single_file_and_shards_give_the_same_parameters(tmp_path: Path) -> None:
    files, tensors = hf_folder(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    single = dict(load(files).named_parameters())
    (tmp_path / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / part)
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, parameter in load(files).named_parameters():
        assert torch.equal(parameter, single[name])
    qkv = single["blocks.1.qkv.weight"]
    for letter, rows in (("q", slice(0, 32)), ("k", slice(32, 48)), ("v", slice(48, 64))):
        assert torch.equal(qkv[rows], tensors[f"model.layers.1.self_attn.{letter}_proj.weight"])
    assert torch.equal(
        single["blocks.0.ffn.gate_up.weight"][64:], tensors["model.layers.0.mlp.up_proj.weight"]
    )


def test_rows_arrive_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_CHUNK_BYTES", 4 * 32 * 7)  # seven rows of 32
    files, tensors = hf_folder(tmp_path, dtype="bfloat16")
    save_file({n: t.bfloat16() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    model = load(files, torch.float16)
    wanted = tensors["model.embed_tokens.weight"].bfloat16().half()
    assert torch.equal(model.embed.weight, wanted)
    assert dtypes_of(open_checkpoint(files)) == {"bfloat16"}


class Counting:
    """A checkpoint that says who read what; reading `broken` fails. readers: so many threads are
    awaited in the first read of each."""

    gguf = True

    def __init__(self, inner: Any, broken: str = "", readers: int = 1) -> None:
        self.inner, self.tensors, self.broken = inner, inner.tensors, broken
        self.threads: set[int] = set()
        self.read_names: list[str] = []
        self._all_there = threading.Barrier(readers, timeout=60)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if threading.get_ident() not in self.threads:
            self.threads.add(threading.get_ident())
            self._all_there.wait()
        self.read_names.append(name)
        time.sleep(1e-3)  # as a disk: another thread's turn
        if name == self.broken:
            raise ModelError(f"{name} is broken")
        rows: torch.Tensor = self.inner.read(name, start, stop)
        return rows


class Stored(dict[str, torch.Tensor]):
    """Tensors under their GGUF names, as a checkpoint."""

    gguf = True

    @property
    def tensors(self) -> Any:
        return self

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self[name][start:stop]

    def raw(self, name: str, start: int, stop: int) -> ggml.Bytes:
        return bytes_of(self.read(name, start, stop))


def gguf_tensors(spec: ModelSpec) -> Stored:
    draw = torch.Generator().manual_seed(0)
    slots = module_of(spec.architecture).slots(spec)
    return Stored({slot.gguf: torch.randn(slot.shape, generator=draw) for slot in slots})


ON_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="upload: no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CARD)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_upload_by_threads_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype
) -> None:
    files, _ = hf_folder(tmp_path)
    spec = read_spec(files)
    stored = gguf_tensors(spec)
    whole = load_model(spec, stored, dtype)
    monkeypatch.setattr(pieces, "_CHUNK_BYTES", 4 * 32 * 9)  # a head has 8 rows of 32
    slots = module_of(spec.architecture).slots(spec)
    todo = [piece for slot in slots for piece in pieces.pieces(slot, slot.gguf, gguf=True)]
    assert {len(piece.order) for piece in todo} == {0, 8}
    with torch.device(device):
        filled = module_of(spec.architecture).build(spec, dtype)
    parameters = dict(filled.named_parameters())
    for parameter in parameters.values():
        parameter.fill_(torch.nan)
    checkpoint, told = Counting(stored, readers=3), list[int]()
    upload(parameters, todo, checkpoint, 3, told.append)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameters[name].cpu(), parameter), name
    assert len(checkpoint.threads) == 3
    assert len(checkpoint.read_names) == len(todo) == len(told)
    assert sum(told) == sum(p.numel() * p.element_size() for p in parameters.values())


def test_an_upload_ends_at_the_first_error(tmp_path: Path) -> None:
    files, _ = hf_folder(tmp_path, num_hidden_layers=30)
    spec = read_spec(files)
    slots = module_of(spec.architecture).slots(spec)
    todo = [piece for slot in slots for piece in pieces.pieces(slot, slot.gguf, gguf=True)]
    checkpoint = Counting(gguf_tensors(spec), broken="blk.0.ffn_up.weight")
    parameters = dict(module_of(spec.architecture).build(spec, torch.float32).named_parameters())
    with pytest.raises(ModelError, match="is broken"):
        upload(parameters, todo, checkpoint, 3)
    assert len(checkpoint.read_names) < len(todo) / 2


def test_progress_is_counted(tmp_path: Path) -> None:
    files, tensors = hf_folder(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    told: list[tuple[int, int]] = []
    load_model(
        read_spec(files),
        open_checkpoint(files),
        torch.float32,
        progress=lambda done, total: told.append((done, total)),
    )
    size = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert len(told) == len(tensors)
    assert {total for _, total in told} == {size}
    assert sorted(told) == told
    assert told[-1] == (size, size)


def test_names_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    """As of a model saved without its head; a tensor under both names is one too many."""
    files, tensors = hf_folder(tmp_path, tie_word_embeddings=True)
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = dict(load(files).named_parameters())
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert bare.keys().isdisjoint(tensors)
    save_file(bare, tmp_path / "model.safetensors")
    for name, parameter in load(files).named_parameters():
        assert torch.equal(parameter, wanted[name])
    both = bare | {"model.norm.weight": bare["norm.weight"].clone()}
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 there under another name too: (model\.)?norm\.weight"):
        load(files)


def test_tied_models_ignore_a_stored_output_layer(tmp_path: Path) -> None:
    files, tensors = hf_folder(tmp_path, tie_word_embeddings=True)
    extras = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    save_file(tensors | extras, tmp_path / "model.safetensors")
    assert load(files).head is None


def test_a_tied_output_layer_that_differs_is_refused(tmp_path: Path) -> None:
    """transformers would compute with it, and others with the embedding."""
    files, tensors = hf_folder(tmp_path, tie_word_embeddings=True)
    other = tensors["model.embed_tokens.weight"] * 2
    for head in (other, other[:39].clone(), other.half()):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=r"lm_head\.weight is not the embedding, and tie_word"):
            load(files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "1 missing: model.norm.weight"),
        ({"model.new.weight": torch.zeros(2)}, "1 unexpected: model.new.weight"),
        (
            {"model.norm.weight": torch.zeros(33)},
            r"model.norm.weight has shape \[33\], the config asks \[32\]",
        ),
        ({"lm_head.weight": None}, "1 missing: lm_head.weight"),
        (
            {"model.norm.weight": torch.zeros(32, dtype=torch.int64)},
            "model.norm.weight is of type I64, which is not supported",
        ),
    ],
)
def test_misfits_are_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    files, tensors = hf_folder(tmp_path)
    merged = {n: t for n, t in (tensors | change).items() if t is not None}
    save_file(merged, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(files)


GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "layer_norm_epsilon": 1e-5, "vocab_size": 40,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
                    "vocab_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1,
                    "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "prefixes", "unread"),
    [
        (GPT2, [("", ""), ("", "transformer.")], "h.1.attn.bias"),
        (
            GEMMA3,
            [("model.", "language_model.model."), ("model.", "model.language_model.")],
            "vision_tower.patch.weight",
        ),
    ],
    ids=["gpt2", "gemma3"],
)
def test_names_of_other_exporters(
    tmp_path: Path, config: dict[str, Any], prefixes: list[tuple[str, str]], unread: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = ModelFiles("tiny", "hf", tmp_path)
    tensors = tensors_of(read_spec(files))
    found = []
    for old, new in [("", ""), *prefixes]:
        named = {new + name.removeprefix(old): tensor for name, tensor in tensors.items()}
        save_file(named | {unread: torch.zeros(3)}, tmp_path / "model.safetensors")
        found.append(dict(load(files).named_parameters()))
    for parameters in found[1:]:
        assert all(torch.equal(found[0][name], parameters[name]) for name in found[0])
    save_file(named | {new + "more.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 unexpected: .*more\.weight"):
        load(files)


def test_stored_values_become_ours(tmp_path: Path) -> None:
    """GPT-2's matrices are stored with columns first, Gemma's norms without the 1."""
    for config in (GPT2, GEMMA3):
        (tmp_path / "config.json").write_text(json.dumps(config))
        files = ModelFiles("tiny", "hf", tmp_path)
        tensors = tensors_of(read_spec(files))
        save_file(tensors, tmp_path / "model.safetensors")
        ours = dict(load(files).named_parameters())
        if config is GPT2:
            assert torch.equal(ours["blocks.1.qkv.weight"], tensors["h.1.attn.c_attn.weight"].t())
        else:
            stored = tensors["model.layers.1.self_attn.q_norm.weight"]
            assert torch.equal(ours["blocks.1.attention.q_norm.weight"], stored + 1)
            assert ours["norm.weight"].dtype == torch.float32


def test_a_table_stays_in_the_file(tmp_path: Path) -> None:
    """Gemma 3n's vectors of each token and layer: in the type they have there, in its pages; and
    K and V of layers that share others' are not read."""
    config: dict[str, Any] = {
        "architectures": ["Gemma3nForCausalLM"], "hidden_size": 32, "num_hidden_layers": 5,
        "intermediate_size": 48, "vocab_size": 40, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 5000, "hidden_size_per_layer_input": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = ModelFiles("tiny", "hf", tmp_path)
    name, path = "model.embed_tokens_per_layer.weight", tmp_path / "model.safetensors"
    tensors = {key: value.bfloat16() for key, value in tensors_of(read_spec(files)).items()}
    save_file(tensors, path)
    model = load(files)  # the pages are the model's as long as it lives
    table = model.layer_table.weight
    assert table.dtype == torch.bfloat16
    assert torch.equal(table, tensors[name])
    maps = Path("/proc/self/maps")
    if maps.exists():
        spans = [line.split() for line in maps.read_text().splitlines() if str(path) in line]
        bounds = [tuple(int(x, 16) for x in span[0].split("-")) for span in spans]
        assert any(low <= table.data_ptr() < high for low, high in bounds)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_kv_shared_layers": 1}))
    with pytest.raises(ModelError, match="layer 4 shares K and V"):
        read_spec(files)
    shares = {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention"] * 5}
    (tmp_path / "config.json").write_text(json.dumps(config | shares))
    blocks = load(files).blocks
    assert [blocks[i].qkv.weight.shape[0] for i in (3, 4)] == [64, 32]


def test_broken_folders(tmp_path: Path) -> None:
    files, tensors = hf_folder(tmp_path)
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load(files)
    whole = tmp_path / "model.safetensors"
    save_file(tensors, whole)
    whole.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot read"):
        load(files)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks gone\.safetensors"):
        load(files)
    index.write_text(json.dumps({"weight_map": {"a": "../up.safetensors"}}))
    with pytest.raises(ModelError, match="outside its folder"):
        load(files)
    index.write_text("[]")
    with pytest.raises(ModelError, match="not an index"):
        load(files)


# ---------------------------------------------------------------- GGUF

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"]


def write_gguf(
    path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]]
) -> None:
    writer = GGUFWriter(path, "llama")
    for name, (raw, kind) in tensors.items():
        plain = kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
        writer.add_tensor(name, raw, raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind_name", KINDS)
def test_gguf_rows_are_dequantised_to_the_bit(tmp_path: Path, kind_name: str) -> None:
    kind = GGMLQuantizationType[kind_name]
    values = np.random.default_rng(1).normal(size=(9, 64)).astype(np.float32)
    raw = values.astype(np.float16) if kind_name == "F16" else quantize(values, kind)
    write_gguf(tmp_path / "x.gguf", {"a": (raw, kind), "b": (values[0], GGMLQuantizationType.F32)})
    file = GgufFile(tmp_path / "x.gguf")
    wanted = torch.from_numpy(dequantize(raw, kind).astype(np.float32))
    assert torch.equal(file.read("a", 0, 9).float(), wanted)
    assert torch.equal(file.read("a", 3, 7).float(), wanted[3:7])
    assert torch.equal(file.read("b", 0, 64), torch.from_numpy(values[0]))
    assert torch.equal(file.read("b", 5, 9), torch.from_numpy(values[0, 5:9]))


@pytest.mark.parametrize("kind_name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read(tmp_path: Path, kind_name: str) -> None:
    kind = GGMLQuantizationType[kind_name]
    from gguf.constants import GGML_QUANT_SIZES

    _, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(2).integers(0, 60, (4, 2 * size), dtype=np.uint8)
    write_gguf(tmp_path / "x.gguf", {"a": (raw, kind)})
    wanted = torch.from_numpy(dequantize(raw, kind))
    got = GgufFile(tmp_path / "x.gguf").read("a", 1, 3)
    assert torch.equal(got.nan_to_num(), wanted[1:3].nan_to_num())


def test_a_cut_gguf_is_refused(tmp_path: Path) -> None:
    values = np.ones((64, 64), np.float32)
    path = tmp_path / "x.gguf"
    write_gguf(path, {"a": (values, GGMLQuantizationType.F32)})
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelError, match="tensor a ends past the file"):
        GgufFile(path)


def test_an_unknown_tensor_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, {"tensor": (np.ones((4, 32), np.float32), GGMLQuantizationType.F32)})
    data = bytearray(path.read_bytes())
    at = data.index(b"tensor") + 6 + 4 + 2 * 8  # name, dimension count, two dimensions
    data[at : at + 4] = struct.pack("<I", 999)
    path.write_bytes(data)
    with pytest.raises(ModelError, match="unknown GGUF tensor type 999"):
        GgufFile(path)


def test_halves_undo_the_interleaving() -> None:
    rows = torch.arange(2 * 8.0)[:, None].repeat(1, 3)
    # What llama.cpp's converter does to rows stored as halves.
    stored = rows.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert not torch.equal(stored, rows)
    order = head_order(8, paired=True)
    assert torch.equal(ordered(stored, order), rows)
    assert torch.equal(ordered(stored[:, 0], order), rows[:, 0])


# ---------------------------------------------------------------- dummy


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_dummy_weights_need_only_a_config(tmp_path: Path, architecture: str) -> None:
    files, _ = hf_folder(tmp_path, architectures=[architecture], dtype="float32")
    spec = read_spec(files)
    once, again = (dict(load_model(spec, None, torch.float32).named_parameters()) for _ in "ab")
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert torch.equal(once["norm.weight"], torch.ones(32))
    assert 0.01 < float(once["blocks.0.qkv.weight"].std()) < 0.03
    assert ("blocks.0.qkv.bias" in once) == (architecture == "Qwen2ForCausalLM")
    settings = settled(Settings(backend="cpu", load_format="dummy", kv_blocks=4))
    runner, info = load_runner(settings, files, lambda phase, seconds: None)
    assert info.capacity.max_model_len == 64
    runner.close()


def test_block_sizes_are_those_of_the_package() -> None:
    """Those that are known here by themselves, so that a start need not import it."""
    for kind in GGMLQuantizationType:
        if kind in ggml._KNOWN:
            assert ggml._KNOWN[kind] == (kind.name, *GGML_QUANT_SIZES[kind])
        assert ggml.row_bytes(2560, kind) * GGML_QUANT_SIZES[kind][0] == (
            2560 * GGML_QUANT_SIZES[kind][1]
        )
    with pytest.raises(ModelError, match="unknown GGUF tensor type 99"):
        ggml.type_name(99)

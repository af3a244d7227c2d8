"""Models without a file of ours: what of them is refused, and what is said. That their numbers are
right, `test_families.py` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.backends.choose import settled
from headrace.config import Settings
from headrace.errors import ModelError
from headrace.inspection import inspect
from headrace.models import registry
from headrace.models.spec import from_hf
from headrace.runner.build import load_runner
from headrace.sources.files import ModelFiles
from tests.devices import load
from tests.golden.reference import agree, greedy
from tests.golden.stepping import Job, generate

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def saved(kind: str, folder: Path, **changes: Any) -> ModelFiles:
    """A random model of transformers."""
    config = getattr(transformers, f"{kind}Config")(**(SHAPE | changes))
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return ModelFiles(kind, "hf", folder)


def start(files: ModelFiles, **more: Any) -> list[str]:
    """What the start says of the model."""
    fields: dict[str, Any] = {"kv_blocks": 8, "dtype": "float32"}
    settings = settled(Settings(backend="cpu", **(fields | more)))
    runner, info = load_runner(settings, files, lambda name, seconds: None)
    runner.close()
    return info.ledger


def test_the_start_says_that_it_is_slower(tmp_path: Path) -> None:
    lines = start(saved("Olmo2", tmp_path))
    assert any("Olmo2ForCausalLM has no file here: transformers' own layers" in x for x in lines)
    assert any("native kernels do not compute layers of transformers" in line for line in lines)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"strange": torch.zeros(2)}, path)
    with pytest.raises(ModelError, match="unexpected: strange"):
        start(ModelFiles("olmo2", "hf", tmp_path))


def test_causal_masks_of_older_exporters_are_left_alone(tmp_path: Path) -> None:
    """As Pythia's checkpoints have them."""
    files = saved("GPTNeoX", tmp_path)
    path, attention = tmp_path / "model.safetensors", "gpt_neox.layers.1.attention."
    mask = torch.ones(1, 1, 64, 64).tril()
    more = {"bias": mask, "masked_bias": torch.tensor(-1e9), "rotary_emb.inv_freq": torch.ones(4)}
    tensors = {attention + name: tensor for name, tensor in more.items()}
    save_file(load_file(path) | tensors, path)
    start(files)


def test_sizes_and_random_weights(tmp_path: Path) -> None:
    files = saved("Olmo2", tmp_path)
    model = transformers.Olmo2ForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    told = inspect(files)
    assert told.parameters.total == sum(p.numel() for p in model.parameters())
    assert told.features == ["layers of transformers"]
    start(files, load_format="dummy")


def test_layers_that_go_another_way_are_refused(tmp_path: Path) -> None:
    files = saved("Bloom", tmp_path, n_head=4, n_layer=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(ModelError, match="0 of 2 layers use transformers' attention interface"):
        start(files)


@pytest.mark.parametrize("kind", ["OPT", "BioGpt"])
def test_heads_that_ask_for_more_than_states(kind: str, tmp_path: Path) -> None:
    """OPT's goes past the base model, BioGPT's hands on what no decoder here has."""
    changes = {"word_embed_proj_dim": 32, "ffn_dim": 48} if kind == "OPT" else {}
    files = saved(kind, tmp_path, initializer_range=0.3, **changes)
    model = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(tmp_path).eval()
    runner = load("cpu", files, dtype="float32", kv_blocks=16, block_size=8, threads=1)
    (tokens,) = generate(runner, [Job(list(range(20)), 24, chunk=7)])
    runner.close()
    assert agree(tokens, greedy(model, list(range(20)), 24)) > 12


def test_attention_from_a_table_of_its_own_is_refused(tmp_path: Path) -> None:
    files = saved("GPTNeo", tmp_path, attention_types=[[["global", "local"], 1]])
    with pytest.raises(
        ModelError,
        match="GPTNeoForCausalLM: no layer uses transformers' attention interface",
    ):
        start(files)


def test_attention_that_looks_ahead_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = saved("Olmo2", tmp_path)
    attention = transformers.models.olmo2.modeling_olmo2.Olmo2Attention
    made = attention.__init__

    def blind(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self.is_causal = False

    monkeypatch.setattr(attention, "__init__", blind)
    with pytest.raises(ModelError, match="tokens that see later ones"):
        start(files)


def test_attention_that_is_asked_for_twice_in_a_layer_is_refused(tmp_path: Path) -> None:
    """Its keys would lie in one place of the cache: right in one step, wrong in the next."""
    files = saved("DiffLlama", tmp_path, num_key_value_heads=4)
    with pytest.raises(ModelError, match="two calls a layer"):
        start(files)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["RobertaForCausalLM"], "model_type": "roberta", "is_decoder": True},
            "with an encoder",
        ),
        (
            {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": "no"},
            "Olmo2ForCausalLM: transformers says .*'attention_bias' expected bool, got str",
        ),
        (
            {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": None,
             "layer_types": ["full_attention", "sliding_attention"]},
            "sliding layers and no sliding_window",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0,
             "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4,
                              "long_factor": [2.0] * 4}},
            "rotary frequencies of type longrope",
        ),
        (
            {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2",
             "layer_types": ["full_attention", "linear_attention"]},
            "layers of type linear_attention",
        ),
        (
            {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2",
             "quantization_config": {"quant_method": "gptq"}},
            "quantization_config",
        ),
        (
            {"architectures": ["Olmo2ForCausalLM"], "model_type": "no such"},
            "knows no model_type 'no such'",
        ),
        (
            {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv",
             "num_attention_heads": None},
            "its config has no num_attention_heads",
        ),
        (
            {"architectures": ["Olmo2ForSequenceClassification"], "model_type": "olmo2"},
            "'Olmo2ForSequenceClassification' is not supported",
        ),
    ],
    ids=["roberta", "type", "windows", "longrope", "layers", "quantised", "kind", "recurrent",
         "classifier"],
)  # fmt: skip
def test_what_is_not_computed_is_refused(config: dict[str, Any], words: str) -> None:
    sizes = {k: v for k, v in SHAPE.items() if v is not None}
    with pytest.raises(ModelError, match=words):
        from_hf(sizes | config)


def test_keys_that_transformers_4_writes_of_any_model_make_no_encoder() -> None:
    """As in configs written whole: with to_json_file(use_diff=False), or as parts of others."""
    whole: dict[str, Any] = {
        "add_cross_attention": False, "is_decoder": False, "is_encoder_decoder": False,
        "cross_attention_hidden_size": None, "tie_encoder_decoder": False, "pruned_heads": {},
    }  # fmt: skip
    sizes = {k: v for k, v in SHAPE.items() if v is not None}
    config = sizes | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    spec = from_hf(config | whole)
    assert (spec.layers, spec.heads, spec.foreign != "") == (2, 4, True)


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    """As transformers 5 writes time_step_limit of Granite 4.0, also where no layer has states."""
    files = saved(
        "GraniteMoeHybrid", tmp_path, initializer_range=0.3, layer_types=["attention"] * 2,
        num_key_value_heads=2,
        shared_intermediate_size=48, num_local_experts=0, num_experts_per_tok=0,
        position_embedding_type="rope", mamba_n_heads=4, mamba_d_head=16,
    )  # fmt: skip
    model = transformers.GraniteMoeHybridForCausalLM.from_pretrained(tmp_path).eval()
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    path.write_text(json.dumps(config))
    runner = load("cpu", files, dtype="float32", kv_blocks=16, block_size=8, threads=1)
    (tokens,) = generate(runner, [Job(list(range(20)), 24, chunk=7)])
    runner.close()
    assert agree(tokens, greedy(model, list(range(20)), 24)) > 12


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"others need transformers: .* -m pip install"):
        registry.family_of("Olmo2ForCausalLM")

"""Configs in both formats; what is not supported is refused by name (bugs B099, B100)."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.errors import ModelError
from headrace.models import registry
from headrace.models.features import features, refuse_missing
from headrace.models.spec import LayerSpec, ModelSpec, Rope, from_gguf, from_hf, read_spec
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import Header, TensorInfo
from tests.unit.configs import DEEPSEEK3, GEMMA3, HF, LLAMA3

GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 8192,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
}


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 8192,
}


def header(changes: dict[str, Any] | None = None, *, extra: tuple[str, ...] = ()) -> Header:
    metadata = {k: v for k, v in (GGUF | (changes or {})).items() if v is not None}
    tensors = {
        "token_embd.weight": TensorInfo("token_embd.weight", (48, 64), 0, 0),
        **{name: TensorInfo(name, (8,), 0, 0) for name in extra},
    }
    return Header(3, metadata, tensors)


def test_a_llama_config() -> None:
    spec = from_hf(HF | {"rope_scaling": LLAMA3})
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (32, 32, 8, 128)
    assert spec.rope == Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert spec.dtype == "bfloat16"
    assert not spec.tied
    assert not spec.qkv_bias
    assert from_hf({k: v for k, v in HF.items() if k != "num_key_value_heads"}).kv_heads == 32


def test_both_spellings_of_rope() -> None:
    new = from_hf(HF | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}})
    assert new == from_hf(HF | {"rope_scaling": LLAMA3})
    old = {"type": "linear", "factor": 4.0}
    assert from_hf(HF | {"rope_scaling": old}).rope == Rope(500000.0, "linear", 4.0)
    assert from_hf(HF | {"rope_scaling": {"rope_type": "default"}}).rope == Rope(500000.0)


def test_which_spelling_of_rope_counts() -> None:
    """As in transformers: the older one, and an original context said outside."""
    both = {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
    }
    assert from_hf(HF | both).rope == Rope(500000.0, "linear", 4.0)
    outside = {"original_max_position_embeddings": 4096}
    assert from_hf(HF | {"rope_scaling": LLAMA3} | outside).rope.original_positions == 4096
    bare = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert from_hf(HF | {"rope_scaling": bare}).rope.original_positions == 131072
    gemma = GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    ropes = {"sliding_attention": {"rope_theta": 5000.0}}
    spec = from_hf(gemma | {"rope_parameters": ropes})
    assert (spec.rope, spec.local_rope) == (Rope(500000.0, "linear", 4.0), Rope(5000.0))


def test_qwen2_has_biases_and_a_window_that_is_off() -> None:
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    }
    spec = from_hf(HF | qwen)
    assert spec.qkv_bias
    assert spec.tied
    kinds = from_hf(HF | qwen | {"use_sliding_window": True, "max_window_layers": 30}).kinds
    assert [layer.window for layer in kinds] == [0] * 30 + [32768] * 2


def test_mistral_windows() -> None:
    mistral = HF | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert from_hf(mistral).kinds == ()
    assert from_hf(mistral | {"sliding_window": 131072}).kinds == (), "it hides nothing"
    assert from_hf(mistral | {"sliding_window": 4096}).kinds == (LayerSpec(window=4096),) * 32
    assert from_hf(HF | {"sliding_window": 4096}).kinds == (), "Llama has none"


@pytest.mark.parametrize("name", ["Mistral", "Qwen2", "Gemma2", "Gemma3", "Mixtral", "GptOss"])
def test_a_window_as_long_as_the_training_hides_what_scaling_adds(name: str) -> None:
    changes = {
        "architectures": [f"{name}ForCausalLM"], "sliding_window": 4096, "use_sliding_window": True,
        "max_position_embeddings": 4096, "max_window_layers": 0,
    }  # fmt: skip
    if name in ("Mixtral", "GptOss"):
        changes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    plain = from_hf(HF | changes | {"rope_scaling": {"rope_type": "default"}})
    assert {layer.window for layer in plain.every_layer()} == {0}, "it hides nothing"
    for kind in ("yarn", "dynamic"):
        spec = from_hf(HF | changes | {"rope_scaling": {"rope_type": kind, "factor": 4.0}})
        assert spec.max_positions == 16384
        assert 4096 in {layer.window for layer in spec.every_layer()}


def test_ids_are_what_the_tokenizer_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    files = ModelFiles("m", "hf", tmp_path)
    assert read_spec(files).vocab_size == 128256
    tokenizer = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    spec = read_spec(files)
    assert (spec.vocab_size, spec.vocab_rows) == (10, 128256)
    tokenizer = {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_spec(files).vocab_size == 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "truncated"),
        ("[]", "got `array`"),
        ('{"model": [1]}', r"\$.model"),
        ('{"model": {"vocab": {"a": "x"}}}', r"Expected `int`, got `str` - at `\$.model.vocab"),
        ('{"model": {"vocab": {}}, "added_tokens": [1]}', r"\$.added_tokens"),
    ],
)
def test_a_broken_tokenizer(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=rf"tokenizer\.json: .*{named}"):
        read_spec(ModelFiles("m", "hf", tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", None, "[" * 100_000])
def test_a_broken_config(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(ModelFiles("m", "hf", tmp_path))


def test_the_fake_model_has_no_spec() -> None:
    with pytest.raises(ModelError, match="'fake' has no weights"):
        read_spec(ModelFiles("fake", "fake", Path()))


# ---------------------------------------------------------------- GGUF


def test_a_gguf_header() -> None:
    spec = from_gguf(header())
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_rows) == (4, 2, 16, 48)
    assert spec.tied
    assert not from_gguf(header(extra=("output.weight",))).tied


def test_gguf_rope() -> None:
    """bugs B099: the extra frequency tensor, and linear scaling with and without a factor."""
    assert from_gguf(header()).rope == Rope()
    assert from_gguf(header(extra=("rope_freqs.weight",))).rope == Rope(kind="factors")
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert from_gguf(header(linear)).rope == Rope(10000.0, "linear", 4.0)
    assert from_gguf(header({"llama.rope.scaling.type": "linear"})).rope == Rope()
    off = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert from_gguf(header(off)).rope == Rope()
    assert from_gguf(header({"llama.rope.scale_linear": 2.0})).rope == Rope(10000.0, "linear", 2.0)
    bare = from_gguf(header(YARN | {"llama.rope.scaling.original_context_length": None}))
    assert bare.rope.original_positions == bare.max_positions
    plain = from_gguf(header(YARN | {"llama.rope.scaling.factor": None}))
    assert plain.rope == Rope()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (YARN | {"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.dimension_count": 18}, "dimension_count = 18"),
        ({"llama.attention.value_length": 8}, "values shorter"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv for each layer"),
        ({"llama.attention.head_count": [4, 4]}, "head_count for each layer"),
        ({"llama.block_count": None}, "llama.block_count = None"),
        ({"general.architecture": "rwkv7"}, "rwkv7.*known: .*qwen2"),
    ],
)
def test_what_gguf_features_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        from_gguf(header(changes))


def test_frequencies_and_linear_scaling_exclude_each_other() -> None:
    both = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight together"):
        from_gguf(header(both, extra=("rope_freqs.weight",)))


def test_padding_of_a_gguf_vocabulary_is_no_id() -> None:
    words = {"tokenizer.ggml.tokens": ["x"] * 48}
    assert from_gguf(header(words)).vocab_size == 48
    kinds = {"tokenizer.ggml.token_type": [1, 5] + [1] * 40 + [5] * 6}
    assert from_gguf(header(words | kinds)).vocab_size == 42
    assert from_gguf(header()).vocab_size == 48


# ---------------------------------------------------------------- families


@pytest.mark.parametrize("config", [HF | {"architectures": ["GemmaForCausalLM"]}, DEEPSEEK3])
def test_a_classification_head_is_all_that_a_classifier_differs_in(config: dict[str, Any]) -> None:
    spec, name = from_hf(config), config["architectures"][0].replace("CausalLM", "{}")
    name = name.format("SequenceClassification")
    classifier = from_hf(config | {"architectures": [name], "num_labels": 3})
    changed: dict[str, Any] = {"architecture": name, "labels": 3, "tied": True}
    assert classifier == msgspec.structs.replace(spec, **changed)


def test_gemmas_tie_their_output_layer_unless_told_not_to() -> None:
    for name in ("Gemma", "Gemma2", "Gemma3", "Gemma3n"):
        config = GEMMA3 | {"architectures": [f"{name}ForCausalLM"]}
        assert from_hf(config).tied
        assert not from_hf(config | {"tie_word_embeddings": False}).tied
    text = {key: value for key, value in HF.items() if key != "architectures"}
    both = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": text | {"tie_word_embeddings": True},
    }
    assert not from_hf(both).tied, "the outer part counts"


def test_what_a_config_leaves_out_is_as_in_its_class() -> None:
    """transformers reads such configs too, and no two families have the same defaults."""

    def read(name: str, **more: Any) -> ModelSpec:
        config = HF | {"architectures": [f"{name}ForCausalLM"], "sliding_window": "?"} | more
        drop = {"sliding_window", "rope_theta"} - more.keys()
        return from_hf({key: value for key, value in config.items() if key not in drop})

    assert {layer.window for layer in read("Mistral").kinds} == {4096}
    assert {layer.window for layer in read("Qwen2", use_sliding_window=True).kinds} == {0, 4096}
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert read("Mixtral", **mixture).rope == Rope(1e6)
    oss = read("GptOss", **mixture)
    assert [layer.window for layer in oss.kinds[:2]] == [128, 0]
    assert oss.rope == Rope(
        150000.0, "yarn", 32.0, original_positions=4096, truncate=False,
        magnitude=0.1 * math.log(32) + 1,
    )  # fmt: skip
    assert (
        read("GptOss", **mixture, rope_parameters={"rope_type": "default"}).rope.kind == "default"
    )
    gemma = read("Gemma2")
    assert (gemma.head_dim, gemma.softcap, gemma.logit_softcap) == (256, 50.0, 30.0)
    assert [layer.window for layer in gemma.kinds[:2]] == [4096, 0]
    assert {layer.scale for layer in read("Gemma2", head_dim=64).kinds} == {256**-0.5}
    assert read("Gemma2", attn_logit_softcapping=None).softcap == 0.0
    for key in ("routed_scaling_factor", "n_group", "topk_group"):
        with pytest.raises(ModelError, match=f"{key} = None"):
            from_hf({k: v for k, v in DEEPSEEK3.items() if k != key})


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "head_dim"),
    [
        ("Llama", 32, 32, 128), ("Mistral", 32, 8, 128), ("Mixtral", 32, 8, 128),
        ("Qwen2", 32, 32, 128), ("Qwen2", 64, 32, 64), ("Qwen3", 64, 32, 128),
        ("Qwen3Moe", 32, 4, 128), ("GptOss", 32, 8, 64), ("Glm", 64, 2, 128), ("Glm4", 64, 2, 128),
        ("Gemma", 32, 16, 256), ("Gemma2", 32, 4, 256),
    ],
)  # fmt: skip
def test_heads_that_a_config_leaves_out_are_those_of_its_class(
    name: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    config = HF | {"architectures": [f"{name}ForCausalLM"], "num_attention_heads": heads}
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config |= mixture if name in ("Mixtral", "Qwen3Moe", "GptOss") else {}
    spec = from_hf({key: value for key, value in config.items() if key != "num_key_value_heads"})
    assert (spec.kv_heads, spec.head_dim) == (kv_heads, head_dim)


def test_gemma3_layers_in_all_spellings() -> None:
    old = GEMMA3 | {"rope_local_base_freq": 5000.0, "query_pre_attn_scalar": 168}
    spec = from_hf(old | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [layer.rope for layer in spec.kinds[:7]] == ["local"] * 5 + ["global", "local"]
    assert [layer.window for layer in spec.kinds[:6]] == [512] * 5 + [0]
    assert {layer.scale for layer in spec.kinds} == {168**-0.5}
    assert (spec.rope, spec.local_rope) == (Rope(500000.0, "linear", 8.0), Rope(5000.0))
    assert spec.tied
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0}
    ropes = {"full_attention": full, "sliding_attention": {"rope_theta": 5000.0}}
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 6
    new = GEMMA3 | {"rope_parameters": ropes, "layer_types": kinds[:32]}
    assert from_hf(new | {"query_pre_attn_scalar": 168}) == spec
    text = {key: value for key, value in HF.items() if key not in ("architectures", "vocab_size")}
    both = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    assert from_hf(both).vocab_size == 262208, "its class's default"


@pytest.mark.parametrize(
    ("says", "act"),
    [
        ({}, "gelu_tanh"),
        ({"hidden_act": "gelu"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"hidden_act": "silu"}, "silu"),
        ({"hidden_activation": "relu"}, "relu"),
    ],
)
def test_the_first_gemma_says_its_activation_as_hidden_act(says: dict[str, Any], act: str) -> None:
    """gelu means the approximation there: transformers takes it so."""
    gemma = HF | {"architectures": ["GemmaForCausalLM"]}
    assert from_hf(gemma | says).act == act


def test_later_gemmas_do_not() -> None:
    gemma2 = HF | {"architectures": ["Gemma2ForCausalLM"], "hidden_act": "silu"}
    assert from_hf(gemma2).act == "gelu_tanh"
    assert from_hf(gemma2 | {"hidden_activation": "gelu"}).act == "gelu"


def test_the_docs_list_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in registry._FAMILIES if f"`{name}`" not in page] == []


def test_mpt_as_its_makers_publish_it() -> None:
    """Keys of mosaicml/mpt-7b-instruct and mpt-7b-storywriter: transformers goes by model_type, and
    computes them with its own MptForCausalLM."""
    published: dict[str, Any] = {
        "architectures": ["MPTForCausalLM"], "model_type": "mpt", "d_model": 4096, "n_heads": 32,
        "n_layers": 32, "expansion_ratio": 4, "max_seq_len": 2048, "vocab_size": 50432,
        "no_bias": True, "learned_pos_emb": True, "logit_scale": None, "resid_pdrop": 0,
        "norm_type": "low_precision_layernorm", "torch_dtype": "bfloat16",
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None,
            "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
        },
    }  # fmt: skip
    spec = from_hf(published)
    assert (spec.architecture, spec.alibi, spec.qkv_clip) == ("MPTForCausalLM", 8.0, 0.0)
    assert (spec.heads, spec.head_dim, spec.ffn, spec.tied) == (32, 128, 16384, True)
    story = published["attn_config"] | {"alibi_bias_max": 16, "clip_qkv": 6}
    spec = from_hf(published | {"attn_config": story, "max_seq_len": 65536})
    assert (spec.alibi, spec.qkv_clip, spec.max_positions) == (16.0, 6.0, 65536)


# ---------------------------------------------------------------- features


def test_a_backend_refuses_what_it_does_not_compute() -> None:
    spec = from_hf(HF | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096})
    assert features(spec) == ["sliding window"]
    assert features(from_hf(HF)) == []
    refuse_missing(spec, {"sliding window"}, "cpu")
    message = "needs what backend = cuda does not compute: sliding window"
    with pytest.raises(ModelError, match=f"MistralForCausalLM {message}"):
        refuse_missing(spec, (), "cuda")


# ---------------------------------------------------------------- registry


def test_an_architecture_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    registry.register("NewForCausalLM", registry.Family("headrace.models.qwen2"))
    assert from_hf(HF | {"architectures": ["NewForCausalLM"]}).qkv_bias
    assert registry.module_of("NewForCausalLM").__name__ == "headrace.models.qwen2"  # type: ignore[attr-defined]


def test_reading_a_spec_imports_no_torch() -> None:
    import subprocess

    code = "import sys, headrace.models.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

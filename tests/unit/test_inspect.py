"""`headrace inspect`: sizes from a config alone, and what a tokenizer makes of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from click.testing import CliRunner
from tokenizers import decoders, models, pre_tokenizers

from headrace.cli.main import cli, main
from headrace.inspection import inspect
from headrace.models.sizes import kv_groups
from headrace.models.spec import from_hf
from headrace.sources.files import ModelFiles
from headrace.text import fake_tokenizer
from headrace.text.byte_level import CHAR_OF
from headrace.text.encoder import LibraryEncoder
from headrace.text.survey import survey
from headrace.text.tokenizer import Tokenizer
from tests.unit import sample_tokenizers

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "hidden_size": 640,
    "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "sliding_window": 512, "query_pre_attn_scalar": 256,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
}  # fmt: skip


def folder(path: Path, config: dict[str, Any]) -> ModelFiles:
    (path / "config.json").write_text(json.dumps(config))
    return ModelFiles("model", "hf", path)


def test_parameters_are_those_of_the_models(tmp_path: Path) -> None:
    """Counts that the models' makers give: 8.03, 30.5 (3.3 active) and 0.268 billion."""
    llama = inspect(folder(tmp_path, LLAMA_8B)).parameters
    assert (llama.total, llama.active) == (8_030_261_248, 8_030_261_248)
    assert llama.vocabulary == 2 * 128256 * 4096
    experts = inspect(folder(tmp_path, QWEN3_30B)).parameters
    assert experts.total == 30_532_122_624
    assert 3.3e9 < experts.active < 3.4e9
    gemma = inspect(folder(tmp_path, GEMMA3)).parameters
    assert gemma.total == 268_098_176


def test_kv_groups_by_window() -> None:
    full, window = kv_groups(from_hf(GEMMA3), 2)
    assert (full.kind, full.window, full.layers) == ("full", 0, 3)
    assert (window.kind, window.window, window.layers) == ("window", 512, 15)
    assert (full.bytes_per_token, window.bytes_per_token) == (3 * 1024, 15 * 1024)
    (alone,) = kv_groups(from_hf(LLAMA_8B), 1, 4)
    assert alone.bytes_per_token == 32 * 2 * 8 * (128 + 4)


def test_what_fits(tmp_path: Path) -> None:
    told = inspect(folder(tmp_path, LLAMA_8B), 24 * 10**9, 4096)
    fits = {fit.weights: fit for fit in told.fits}
    assert list(fits) == ["float32", "bfloat16", "int8", "int4"], "no weights are stored here"
    half = fits["bfloat16"]
    assert half.weight_bytes == 2 * told.parameters.total
    assert half.kv_bytes == 24 * 10**9 - half.weight_bytes
    assert half.tokens == half.kv_bytes // 131072
    assert half.sequences == half.tokens // 4096 == 14
    assert fits["float32"].kv_bytes < 0
    assert (fits["float32"].tokens, fits["float32"].sequences) == (0, 0)
    assert told.tokenizer is None


def test_layers_with_a_window_keep_no_more(tmp_path: Path) -> None:
    """3 layers of 18 keep 8192 tokens, 15 keep 512."""
    told = inspect(folder(tmp_path, GEMMA3), 2 * 10**9, 8192)
    fit = next(fit for fit in told.fits if fit.weights == "bfloat16")
    assert fit.tokens == fit.kv_bytes // 18432
    assert fit.sequences == fit.kv_bytes // (1024 * (3 * 8192 + 15 * 512))


def unreachable() -> Tokenizer:
    """Bytes, `ab` made by a merge, and `abc`, which no merge makes."""
    pieces = [CHAR_OF[b] for b in range(256)] + ["ab", "abc", CHAR_OF[0xC3] + "b"]
    built = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("a", "b")])
    )
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    return Tokenizer(LibraryEncoder(built), sample_tokenizers.card(bos_id=None, add_bos=False))


def test_tokens_that_no_text_gives() -> None:
    found = survey(unreachable())
    assert found.vocabulary == 259
    assert found.unreachable == [257]
    assert found.parts == 128 + 1, "bytes above 127, and one that ends a character wrongly"


def test_characters_a_token() -> None:
    found = survey(Tokenizer(LibraryEncoder(fake_tokenizer.build()), sample_tokenizers.card()))
    assert found.special == 3
    assert found.unreachable == []
    rates = found.characters_per_token
    assert list(rates) == ["prose", "code", "JSON", "CJK", "Japanese"]
    assert rates["prose"] == rates["code"] == rates["JSON"] == 1.0, "a token is a byte"
    assert 0.33 < rates["CJK"] < 0.40
    assert 0.33 < rates["Japanese"] < 0.37


def run(*args: str) -> str:
    done = CliRunner().invoke(cli, ["inspect", *args], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_the_command(tmp_path: Path) -> None:
    folder(tmp_path, GEMMA3)
    fake_tokenizer.build().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 1000)
    shown = run(str(tmp_path), "--memory", "1GiB", "--context", "1000")
    for words in ("Gemma3ForCausalLM", "268.1 million", "512", "15360", "18432", "in 1GiB"):
        assert words in shown
    for words in ("sequences of 1000", "259, 3 of them special", "1.00 characters a token"):
        assert words in shown
    told = json.loads(run(str(tmp_path), "--memory", "1GiB", "--json"))
    assert told["kv_bytes_per_token"] == 18432
    assert told["fits"][0]["weights"] == "as stored"
    assert told["stored_bytes"] == told["fits"][0]["weight_bytes"] == 1000
    assert told["context"] == 32768
    assert not json.loads(run(str(tmp_path), "--json"))["fits"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--memory", "much"], "memory = 'much'"),
        ([], "architecture 'Strange' is not supported"),
    ],
)
def test_what_cannot_be_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: str,
) -> None:
    folder(tmp_path, {"architectures": ["Strange"]})
    monkeypatch.setattr("sys.argv", ["headrace", "inspect", str(tmp_path), *args])
    with pytest.raises(SystemExit):
        main()
    assert words in capsys.readouterr().err

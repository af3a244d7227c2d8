"""`--load-format dummy`: a folder with a config and a tokenizer, and no weights, computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import InvalidRequest, ModelError
from headrace.text import fake_tokenizer
from tests.devices import asked

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 259,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float32",
    "eos_token_id": 258,
}  # fmt: skip
DUMMY: dict[str, Any] = {"load_format": "dummy", "kv_blocks": 16}


def test_random_weights_need_no_weight_files(tmp_path: Path, backend: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    fake_tokenizer.build().save(str(tmp_path / "tokenizer.json"))
    params = headrace.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    said = []
    for _ in range(2):
        with headrace.LLM(str(tmp_path), **asked(backend), **DUMMY) as llm:
            (answer,) = llm.generate("hello", params)
            said.append(answer.token_ids)
    assert len(said[0]) == 8
    assert said[0] == said[1], "the random weights are the same on every start"
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        headrace.LLM(str(tmp_path))


def test_a_config_alone_takes_and_gives_ids(
    tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    params = headrace.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with headrace.LLM(str(tmp_path), **asked(backend), **DUMMY) as llm:
        assert "no tokenizer.json" in capsys.readouterr().err
        (answer,) = llm.generate([5, 6, 7], params)
        assert (len(answer.token_ids), answer.text) == (8, "")
        for prompt, stop in (("hello", []), ([5, 6], ["x"])):
            with pytest.raises(InvalidRequest, match=r"no tokenizer\.json") as caught:
                llm.generate(prompt, headrace.SamplingParams(max_tokens=8, stop=stop))
            assert caught.value.param == ("stop" if stop else "prompt")
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        headrace.LLM(str(tmp_path))

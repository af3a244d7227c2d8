"""Mixtures of experts and latent attention: tiny random models equal transformers' in float32."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.sources.files import ModelFiles
from tests.devices import MARKS, WITHOUT_CUDA, load
from tests.golden.reference import agree, greedy
from tests.golden.stepping import Job, generate

SETTINGS = {
    "dtype": "float32", "kv_blocks": 120, "max_num_seqs": 8, "block_size": 8, "threads": 1,
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from uniform logits: few near-ties
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_parameters": YARN | {"mscale": None, "mscale_all_dim": None, "truncate": False},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | {
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN,
        },
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        LATENT | {"n_shared_experts": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | {"n_shared_experts": 1, "q_lora_rank": 20, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": YARN},
    ),
}


def tiny(name: str, folder: Path) -> tuple[Any, ModelFiles]:
    """A random model in eval mode, and its files."""
    torch.manual_seed(len(name))
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith(("bias", "sinks")):  # transformers starts some of them at zero
            torch.nn.init.normal_(tensor.detach(), std=0.3)
    model.save_pretrained(folder)
    return model, ModelFiles(name, "hf", folder)


ON_CUDA = [name for name in MODELS if name != "deepseek-v2-lite"]
PAIRS = [pytest.param(("cpu", name), marks=MARKS["cpu"], id=name) for name in MODELS]
if not WITHOUT_CUDA:
    PAIRS += [
        pytest.param(("cuda", name), marks=MARKS["cuda"], id=f"{name}-cuda") for name in ON_CUDA
    ]


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    backend, name = request.param
    model, files = tiny(name, tmp_path_factory.mktemp(name))
    runner = load(backend, files, **SETTINGS)
    yield model, runner
    runner.close()


def prompts(n: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(131) for _ in range(rng.randint(1, 70))] for _ in range(n)]


def test_greedy_equals_transformers(pair: tuple[Any, Any]) -> None:
    """64 tokens, past every window and the context that the positions were made for."""
    model, runner = pair
    prompt = prompts(1)[0] + list(range(30))
    expected = greedy(model, prompt, 64)
    (tokens,) = generate(runner, [Job(prompt, 64)])
    assert agree(tokens, expected) == 64, "fixed weights: no near-tie goes the other way"


def test_chunks_and_neighbours_change_nothing(pair: tuple[Any, Any]) -> None:
    _, runner = pair
    alone = [generate(runner, [Job(p, 8)])[0] for p in prompts(3)]
    rng = random.Random(3)
    jobs = [Job(p, 8, chunk=rng.choice([1, 7, 16]), arrives=rng.randrange(6)) for p in prompts(3)]
    assert generate(runner, jobs, shuffle_seed=5) == alone


def settled(runner: Any) -> dict[str, int]:
    """Counts on a card come a call late."""
    for _ in range(2):
        runner.counters()
        if not WITHOUT_CUDA:
            torch.cuda.synchronize()
    return dict(runner.counters())


def test_experts_are_counted(pair: tuple[Any, Any]) -> None:
    model, runner = pair
    before = settled(runner)
    generate(runner, [Job(list(range(10)), 3)])
    after = settled(runner)
    got = [after[key] - before[key] for key in after if key.endswith("_tokens")]
    config = model.config
    dense = getattr(config, "first_k_dense_replace", 0) + len(
        getattr(config, "mlp_only_layers", None) or ()
    )
    layers = config.num_hidden_layers - dense
    assert len(got) == (getattr(config, "n_routed_experts", 0) or config.num_local_experts)
    # The last layer computes the tokens that are drawn from; a backend may compute all.
    least = ((layers - 1) * 12 + 3) * config.num_experts_per_tok
    assert least <= sum(got) <= layers * 12 * config.num_experts_per_tok
    assert after["experts_hit"] > before["experts_hit"]


def test_logits_are_close(pair: tuple[Any, Any]) -> None:
    from tests.golden.test_tiny import _leave, _prefill

    model, runner = pair
    if not hasattr(runner, "forward"):
        pytest.skip("a runner on a card keeps its logits there: its tokens are compared")
    (prompt,) = prompts(1)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
        logits = runner.forward(_prefill(prompt)).logits
    assert logits is not None
    torch.testing.assert_close(torch.from_numpy(logits[0]), expected, rtol=1e-4, atol=1e-4)
    runner.forward(_leave())


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Random blocks: the same tokens as of a model that stores what they say."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    MODELS["gpt-oss-32"] = (
        "GptOss",
        MODELS["gpt-oss"][1] | {"hidden_size": 64, "intermediate_size": 32},
    )
    model, files = tiny("gpt-oss-32", tmp_path)
    del MODELS["gpt-oss-32"]
    tensors = load_file(tmp_path / "model.safetensors")
    rng = torch.Generator().manual_seed(1)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(key).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=rng, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=rng, dtype=torch.uint8)
        tensors[key + "_blocks"], tensors[key + "_scales"] = blocks, scales
        whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(key).data.copy_(whole)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = load("cpu", files, **SETTINGS)
    prompt = list(range(20))
    (tokens,) = generate(runner, [Job(prompt, 16)])
    assert agree(tokens, greedy(model, prompt, 16)) == 16
    runner.close()

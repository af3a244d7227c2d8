"""What mixtures have beyond other families (test_families.py): counts of experts, MXFP4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.runner import expert_copies
from tests.devices import MARKS, WITHOUT_CUDA, load
from tests.golden.families import MIXTURES, VOCAB, save
from tests.golden.on_cuda import OnCuda
from tests.golden.reference import agree, greedy
from tests.golden.stepping import Job, generate

SETTINGS = {
    "dtype": "float32", "kv_blocks": 240, "max_num_seqs": 8, "block_size": 8, "threads": 1,
}  # fmt: skip
ON_CUDA = [name for name in MIXTURES if name != "deepseek-v2-lite"]
PAIRS = [pytest.param(("cpu", name), marks=MARKS["cpu"], id=name) for name in MIXTURES]
if not WITHOUT_CUDA:
    PAIRS += [
        pytest.param(("cuda", name), marks=MARKS["cuda"], id=f"{name}-cuda") for name in ON_CUDA
    ]


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    backend, name = request.param
    model, files = save(name, tmp_path_factory.mktemp(name))
    runner = load(backend, files, **SETTINGS)
    yield model, runner
    runner.close()


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


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Random blocks: the same tokens as of a model that stores what they say."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, files = save("gpt-oss", tmp_path, hidden_size=64, intermediate_size=32)
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


@pytest.mark.skipif(bool(WITHOUT_CUDA), reason="copies are for a card")
@pytest.mark.parametrize(
    ("name", "ffn"),
    [
        ("qwen3-moe", "moe_intermediate_size"),
        ("deepseek-v2", "moe_intermediate_size"),
        ("gpt-oss", "intermediate_size"),
    ],
)
def test_copies_of_experts_say_what_the_experts_say(
    name: str, ffn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of the middle token, in single tokens, chunks and whole prompts: as close to
    transformers' float32 as without copies, whether all layers have them or one; and the start has
    compiled all kernels."""
    model, files = save(name, tmp_path, **{"hidden_size": 384, ffn: 128})
    prompts = [[(7 * i + j) % VOCAB for j in range(40)] for i in range(5)]
    with torch.inference_mode():
        exact = [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]
    scale = max(float(logits.abs().max()) for logits in exact)
    errors = {}
    for copies in ("off", "all", "auto"):
        given: dict[str, Any] = SETTINGS | {"dtype": "bfloat16", "expert_copies": copies}
        del given["threads"]
        monkeypatch.setattr(expert_copies, "_budget_bytes", lambda *_: 1)
        monkeypatch.setattr(expert_copies, "_copy_bytes", lambda _: 1)
        made = OnCuda(load("cuda", files, **given), 8)
        forward = made.runner._forward
        routed = [
            i for i, layer in enumerate(forward.model.spec.every_layer()) if layer.mlp == "experts"
        ]
        wanted = {"off": routed[:0], "all": routed, "auto": routed[:1]}[copies]
        assert sorted(forward.place.buffers.mixture.copies) == wanted
        before = made.runner.counters()["jit_compiles"]
        for chunk in (1, 7, 40):
            off = [
                (mine - theirs).abs().amax(1)
                for mine, theirs in zip(made.logits(prompts, chunk), exact, strict=True)
            ]
            errors[copies, chunk] = float(torch.cat(off).median()) / scale
        assert made.runner.counters()["jit_compiles"] == before
        made.close()
    for (copies, chunk), error in errors.items():
        assert error < max(2e-2, 1.5 * errors["off", chunk]), (copies, chunk, errors)

"""`headrace plan`: sizes, limits and costs by hand; its command, and a server beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from headrace.accelerators import ACCELERATORS, Accelerator, processor
from headrace.cli import plan as plan_command
from headrace.cli.main import cli, main
from headrace.errors import ConfigError
from headrace.models.shape import shape_of
from headrace.models.sizes import parameters
from headrace.models.spec import from_hf
from headrace.native.build import Unavailable
from headrace.native.library import Library
from headrace.planning import AS_STORED, Planner
from tests.unit.test_inspect import GEMMA3, LLAMA_8B, QWEN3_30B, folder

LAYERS = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # matrix elements
HEAD = 128256 * 4096
KV = 32 * 2 * 8 * 128 * 2  # bytes a token
ROUND = Accelerator("round", 100 * 10**9, 1e12, 1e14, "a test")


def test_a_decode_step_by_hand(tmp_path: Path) -> None:
    planner = Planner(folder(tmp_path, LLAMA_8B), ROUND, price_per_hour=3.6)
    one = planner.decode(1000, 4)
    size = 2 * (LAYERS + HEAD) + 4 * 1000 * KV
    flops = 2 * 4 * (LAYERS + HEAD) + 2 * 4 * 1000 * 32 * 32 * 256
    assert one.limit.bound == "memory"
    assert one.limit.seconds == pytest.approx(size / 1e12)
    assert one.limit.flops_per_byte == pytest.approx(flops / size)
    assert one.tokens_per_s == pytest.approx(4 / one.limit.seconds)
    assert one.cost_per_million == pytest.approx(one.limit.seconds / 4 * 1e6 * 0.001)
    assert one.fits


def test_rows_in_slower_memory_take_no_room(tmp_path: Path) -> None:
    """Gemma 3n's vectors of each token and layer."""
    gemma = {
        "architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 10, "hidden_size": 256,
        "intermediate_size": 512, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 1000,
    }  # fmt: skip
    rows = 1000 * 10 * 256
    files = folder(tmp_path, gemma)
    assert parameters(from_hf(gemma)).apart == rows
    every = parameters(from_hf(gemma)).total
    assert Planner(files, ROUND).plan([1], [1], [1]).weight_bytes == 2 * (every - rows)
    int8 = Planner(files, ROUND, weights="int8").plan([1], [1], [1]).weight_bytes
    assert int8 == parameters(from_hf(gemma)).weight_bytes("int8") - rows * 34 // 32


def test_a_prompt_by_hand(tmp_path: Path) -> None:
    one = Planner(folder(tmp_path, LLAMA_8B), ROUND).prefill(2000)
    flops = 2 * (2000 * LAYERS + HEAD) + 2 * 2000 * 2001 // 2 * 32 * 32 * 256
    assert one.limit.bound == "compute"
    assert one.limit.seconds == pytest.approx(flops / 1e14)
    assert one.cost_per_million is None


def test_what_fits(tmp_path: Path) -> None:
    files = folder(tmp_path, LLAMA_8B)
    plan = Planner(files, ROUND, utilization=0.5).plan([1000, 5000], [1], [8])
    assert plan.weight_bytes == 2 * 8_030_261_248
    assert plan.kv_tokens == (50 * 10**9 - plan.weight_bytes) // KV
    assert [room.sequences for room in plan.rooms] == [plan.kv_tokens // n for n in (1000, 5000)]
    most = plan.kv_tokens // 1000
    planner = Planner(files, ROUND, utilization=0.5)
    assert [planner.decode(1000, n).fits for n in (most, most + 1)] == [True, False]
    longest = plan.kv_tokens
    assert [planner.prefill(n).fits for n in (longest, longest + 1)] == [True, False]
    small = Planner(files, msgspec.structs.replace(ROUND, memory_bytes=10**9))
    assert small.kv_tokens == 0
    assert not small.decode(1, 1).fits
    half = Planner(files, ROUND, kv_dtype="int8")
    assert half.shape.kv_token_bytes == 32 * 2 * 8 * (128 + 4)


def test_products_bound_from_some_batch_on(tmp_path: Path) -> None:
    planner = Planner(folder(tmp_path, LLAMA_8B), ROUND)
    even = planner.plan([16], [1], [8]).even_batch
    assert planner.decode(16, even - 1).limit.bound == "memory"
    assert planner.decode(16, even).limit.bound == "compute"
    never = planner.plan([100_000], [1], [8])
    assert never.even_batch == 0, "reading the contexts takes longer than anything"


def test_efficiency_scales_both_rates(tmp_path: Path) -> None:
    files = folder(tmp_path, LLAMA_8B)
    whole, half = Planner(files, ROUND), Planner(files, ROUND, efficiency=0.5)
    assert half.decode(10, 1).limit.seconds == 2 * whole.decode(10, 1).limit.seconds
    assert half.prefill(999).limit.seconds == 2 * whole.prefill(999).limit.seconds


def test_windows_are_read_and_no_more() -> None:
    shape = shape_of(from_hf(GEMMA3))
    assert shape.seen(100) == 100
    assert shape.seen(4096) == (3 * 4096 + 15 * 512) / 18
    counted = sum(3 * n + 15 * min(n, 512) for n in range(1, 2001)) / 18
    assert shape.pairs(2000) == pytest.approx(counted)


def test_windows_are_kept_and_no_more(tmp_path: Path) -> None:
    plan = Planner(folder(tmp_path, GEMMA3), ROUND).plan([8192], [1], [8192])
    kept = 1024 * (3 * 8192 + 15 * 512)
    assert [room.sequences for room in plan.rooms] == [plan.kv_bytes // kept]
    assert plan.prefill[0].fits


def test_a_mixture_reads_what_its_tokens_hit(tmp_path: Path) -> None:
    planner = Planner(folder(tmp_path, QWEN3_30B), ROUND)
    mixture = planner.shape.mixture
    assert mixture is not None
    assert mixture.hit(1) == pytest.approx(8)
    assert 100 < mixture.hit(32) < mixture.hit(64) < 128
    one, many = planner.decode(1, 1).limit, planner.decode(1, 64).limit
    assert one.seconds == pytest.approx(planner.shape.weight_bytes / 1e12, rel=0.001)
    expert = 48 * 3 * 2048 * 768 * 2
    more = (mixture.hit(64) - 8) * expert / 1e12
    assert many.seconds - one.seconds == pytest.approx(more, rel=0.01)


def test_weights_as_they_are_stored(tmp_path: Path) -> None:
    files = folder(tmp_path, LLAMA_8B)
    with pytest.raises(ConfigError, match="no weights here") as raised:
        Planner(files, ROUND, weights=AS_STORED)
    assert raised.value.param == "weights"
    (tmp_path / "model.safetensors").write_bytes(bytes(8030))
    planner = Planner(files, ROUND)
    plan = planner.plan([1], [1], [1])
    assert (plan.weights, plan.weight_bytes) == (AS_STORED, 8030)
    assert plan.step_weight_bytes == pytest.approx(8030 * (LAYERS + HEAD) / 8_030_261_248)
    assert Planner(files, ROUND, weights="int4").plan([1], [1], [1]).weight_bytes > 4e9


def test_the_page_has_each_card_as_it_is() -> None:
    page = Path(__file__).parents[2] / "docs" / "plan.md"
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([^|]+) \|", page.read_text(), re.M
    )
    assert [
        Accelerator(name, int(memory) * 10**9, float(reads) * 10**9, float(tflops) * 10**12, source)
        for name, memory, reads, tflops, source in rows
    ] == list(ACCELERATORS.values())


def test_cards_are_whole_and_the_processor_is_measured() -> None:
    for name, card in ACCELERATORS.items():
        assert card.name == name
        assert 10e9 < card.memory_bytes < 1e12
        assert 50 < card.ridge < 600, "FLOPs a byte of every card since 2017"
    here = processor(rounds=1)
    assert min(here.memory_bytes, here.read_bytes_per_s, here.flops_per_s) > 1e6


def test_a_processor_multiplies_as_its_server_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8 kernels for what may be quantised, where there are any; else float32."""
    model, library = str(folder(tmp_path, LLAMA_8B).path), Library.__new__(Library)
    monkeypatch.setattr(plan_command, "processor", lambda: ROUND)
    monkeypatch.setattr(plan_command, "product_rate", lambda library, threads: 1e15)
    monkeypatch.setattr(plan_command, "load", lambda: library)

    def rate(*args: str) -> float:
        plan = json.loads(run(model, "--device", "cpu", "--json", *args))["plan"]
        return float(plan["device"]["flops_per_s"])

    assert rate() == rate("--weights", "int4") == 1e15
    assert rate("--weights", "float32") == ROUND.flops_per_s
    monkeypatch.setattr(plan_command, "load", lambda: Unavailable("no compiler", "install one"))
    assert rate() == ROUND.flops_per_s


def run(*args: str) -> str:
    return CliRunner().invoke(cli, ["plan", *args], catch_exceptions=False).output


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path, LLAMA_8B)
    told = run(str(tmp_path), "--device", "h100", "--price", "2", "--batch", "1,100000")
    for part in ("16.06 GB bfloat16", "131072 bytes a token", "does not fit", "a million tokens"):
        assert part in told
    assert "measured:" not in told
    args = ["--device", "l4", "--memory", "48GB", "--tflops", "7", "--json", "--prompt", "8"]
    plan = json.loads(run(str(tmp_path), *args))["plan"]
    assert plan["device"] == {
        "name": "l4",
        "memory_bytes": 48 * 10**9,
        "read_bytes_per_s": 300e9,
        "flops_per_s": 7e12,
        "source": "partly as given, else L4 data sheet",
    }
    assert [one["tokens"] for one in plan["prefill"]] == [8]
    large = run(str(tmp_path), "--device", "4090", "--weights", "float32")
    assert "the weights are too large" in large


def test_the_command_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*args: Any) -> str:
        monkeypatch.setattr("sys.argv", ["headrace", "plan", *map(str, args)])
        with pytest.raises(SystemExit) as raised:
            main()
        assert raised.value.code == 2
        return capsys.readouterr().err

    folder(tmp_path, LLAMA_8B)
    assert "is not one of" in failed(tmp_path, "--device", "h1000")
    assert "memory" in failed(tmp_path, "--device", "h100", "--memory", "lots")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no copy here" in failed("hf:no/such-model", "--device", "h100")

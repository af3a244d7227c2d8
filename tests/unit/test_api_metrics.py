"""Counters rise, gauges follow, and processes add up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from headrace.engine.stats import EngineStats
from headrace.observe.metrics import ApiMetrics, EngineMetrics, expose

SHOWN = ("reason", "event", "finished_reason")  # labels that name a series in `values`


def stats(
    running: int,
    tokens: int,
    finished: dict[str, int],
    kv_used: int = 0,
    runner: Mapping[str, int] = {},
) -> EngineStats:
    return EngineStats(
        running=running,
        waiting=3,
        kv_blocks=10,
        kv_used=kv_used,
        steps=tokens,
        preemptions=0,
        recomputed_tokens=0,
        prompt_tokens=0,
        cached_tokens=0,
        generation_tokens=tokens,
        finished=finished,
        started=running + 3 + sum(finished.values()),
        runner=runner,
    )


def values(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f" {v}" for k, v in sample.labels.items() if k in SHOWN):
            sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip


def test_engine_metrics_in_one_process() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics("m", 16, registry)
    metrics.update(stats(2, 5, {"stop": 1}, kv_used=4))
    metrics.update(stats(1, 9, {"stop": 2, "abort": 1}, kv_used=5))
    metrics.update(stats(1, 9, {"stop": 2, "abort": 1}, kv_used=5))
    found = values(expose(registry).decode())
    assert found["headrace_requests_running"] == found["vllm:num_requests_running"] == 1
    assert found["headrace_step_time_factor"] == 1.0
    metrics.update(msgspec.structs.replace(stats(0, 9, {"stop": 3, "abort": 1}), step_factor=1.08))
    assert values(expose(registry).decode())["headrace_step_time_factor"] == 1.08
    assert found["headrace_requests_waiting"] == found["vllm:num_requests_waiting"] == 3
    assert found["headrace_kv_usage_ratio"] == found["vllm:kv_cache_usage_perc"] == 0.5
    assert found["vllm:cache_config_info"] == 1
    assert found["headrace_generation_tokens_total"] == 9
    assert found["headrace_requests_finished_total stop"] == 2
    assert found["headrace_requests_finished_total abort"] == 1
    assert found["headrace_requests_started_total"] == 7
    assert found["headrace_requests_finished_total lost"] == 0
    assert found["vllm:request_success_total stop"] == 2
    assert "vllm:request_success_total lost" not in found


def test_what_ended_is_counted_before_a_gauge_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """B086: another process may read between any two writes of an update."""
    registry = CollectorRegistry()
    metrics = EngineMetrics("m", 16, registry)
    metrics.update(stats(2, 5, {"abort": 0}, kv_used=4))
    seen = []
    write = Gauge.set

    def look(gauge: Gauge, value: float) -> None:
        seen.append(values(expose(registry).decode()))
        write(gauge, value)

    monkeypatch.setattr(Gauge, "set", look)
    metrics.update(stats(0, 9, {"abort": 2}))
    assert len(seen) == 3  # running, blocks used and their share
    for found in seen:
        assert found["headrace_requests_finished_total abort"] == 2
        assert found["headrace_generation_tokens_total"] == 9


def test_what_the_runner_counts_by_event() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics("m", 16, registry)
    metrics.update(stats(1, 1, {}))
    assert not [name for name in values(expose(registry).decode()) if "runner_events" in name]
    metrics.update(stats(1, 1, {}, runner={"late_compiles": 0, "graph_steps": 3}))
    metrics.update(stats(1, 1, {}, runner={"late_compiles": 0, "graph_steps": 3}))
    metrics.update(stats(1, 1, {}, runner={"late_compiles": 0, "graph_steps": 7}))
    found = values(expose(registry).decode())
    assert found["headrace_runner_events_total graph_steps"] == 7
    assert found["headrace_runner_events_total late_compiles"] == 0, "a 0 can be watched"


def test_processes_are_added_up(tmp_path: Path) -> None:
    code = (
        "from headrace.observe.metrics import ApiMetrics\n"
        "m = ApiMetrics('m'); m.count_request('/v1/completions', 200)\n"
        "m.ttft_s.write(0.5)\n"
        "import sys; sys.stdout.buffer.write(m.expose())"
    )
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=60
        )
    found = values(run.stdout.decode())
    assert found["headrace_requests_total"] == 2
    assert found["headrace_ttft_seconds_count"] == 2


def test_one_process_without_a_folder() -> None:
    metrics = ApiMetrics("m", CollectorRegistry())
    metrics.count_request("/health", 200)
    assert values(metrics.expose().decode())["headrace_requests_total"] == 1

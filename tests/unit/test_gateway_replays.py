"""What the bench sends of the workloads of a fleet is what the simulator computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gateway.devices import slowed
from benchmarks.gateway.replays import WORKLOADS, Sizes, curves, trace, workload, write
from headrace.bench.workload import Workload as Load
from headrace.sim.device import H100_14B

SIZES = Sizes(workers=2, block=128, prefixes=6, output_tokens=24, kv_tokens=40_000)


@pytest.mark.parametrize("number", range(len(WORKLOADS)))
def test_the_bench_sends_what_the_simulator_computes(number: int, tmp_path: Path) -> None:
    asked = workload(number, 1.0, H100_14B, 6.0, SIZES)
    file = tmp_path / "trace.jsonl"
    trace(asked, file, SIZES.block)
    load = Load(trace=str(file), trace_block_tokens=SIZES.block, kind="ids", requests=0)
    sessions = list(load.sessions("level"))
    assert len(sessions) == len(asked.requests) > 40
    first: dict[int, list[int]] = {}
    for session, request in zip(sessions, asked.requests, strict=True):
        ask = session.turns[0].asks[0]
        assert isinstance(ask.prompt, list)
        assert (len(ask.prompt), ask.max_tokens) == (request.prompt_tokens, request.output_tokens)
        assert session.at_s == pytest.approx(request.arrival_s)
        begins = first.setdefault(request.chain[0], ask.prompt)  # one id, one text
        assert begins[: SIZES.block] == ask.prompt[: SIZES.block]


@pytest.mark.parametrize("number", range(len(WORKLOADS)))
def test_a_load_is_a_share_of_all_devices_time(number: int) -> None:
    seconds = 400.0
    asked = workload(number, 0.7, H100_14B, seconds, SIZES)
    tokens_s = H100_14B.cost.token_s * asked.prompt_tokens
    assert tokens_s / (SIZES.workers * seconds) == pytest.approx(0.7, rel=0.1)


def test_a_measured_prompt_sets_the_pace_of_the_simulated_worker() -> None:
    device = slowed(1.5, 3328, 4096)
    cost = device.cost
    assert cost.token_s * 3328 + cost.pair_s * 3328**2 / 2 == pytest.approx(1.5)
    assert cost.token_s / cost.pair_s == pytest.approx(H100_14B.cost.token_s / H100_14B.cost.pair_s)
    assert device.kv_tokens == 4096


def test_what_is_written_has_a_row_a_run(tmp_path: Path) -> None:
    points = curves(H100_14B, 3.0, SIZES, (0.5, 1.5), ("token_cost", "round_robin"))
    text = write(points, tmp_path / "fleet", {"title": "A fleet"})
    assert text.count("| simulated ") == len(points) == 2 * 2 * len(WORKLOADS)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".md", ".svg", ".png"}

"""The load generator and a real server: sessions, prefixes, schemas, dropped requests."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from headrace.bench.load import Target, run_loop
from headrace.bench.measure import Meter
from headrace.bench.stats import Level, Shape
from headrace.bench.workload import Workload
from headrace.cli.main import cli
from tests.e2e.serving import Server


@pytest.mark.parametrize(
    ("given", "much"),
    [(["--requests", "2"], "2 requests a level"), (["--duration", "0.2"], "0.2 s a level")],
)
def test_what_ends_a_level_is_said(shared_server: Server, given: list[str], much: str) -> None:
    args = ["bench", "--url", shared_server.url, "--concurrency", "1", "--max-tokens", "2"]
    done = CliRunner().invoke(cli, [*args, *given, "--prompt-tokens", "4"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert f" fake: {much}, " in done.output


def test_a_mixed_level_adds_up(shared_server: Server) -> None:
    load = Workload(
        requests=24,
        turns=3,
        prefixes=2,
        prefix_tokens=40,
        prompt_tokens=8,
        max_tokens=12,
        structured=0.3,
        cancel=0.25,
        nonce="e2e",
        seed=4,  # of these, some leave at the head of the answer
    )
    names = [model["id"] for model in shared_server.get("/v1/models")[1]["data"]]
    meter = Meter(Target(url=shared_server.url, model=names[0]), load, scrape=True)

    async def run() -> Level:
        return await meter.level(Shape(concurrency=4))

    found = run_loop(run())
    asked = [ask for s in load.sessions("level 4", 8) for turn in s.turns for ask in turn.asks]
    drops = [ask.cancel_after_chunks for ask in asked if ask.cancel_after_chunks is not None]
    assert (found.errors, found.sheds, found.unsent) == ({}, {}, 0)
    assert found.requests == 24
    # One that comes in fewer pieces than its client waits for is whole before it is dropped.
    assert 0 < drops.count(0) <= found.cancelled <= len(drops)
    assert found.cached_tokens > 0
    assert found.counted_by_chunks == 0
    assert found.server["headrace_requests_started_total"].max > 0
    plain = [r for r in meter.records if r.good and r.finish_reason == "length"]
    assert plain
    assert {record.output_tokens for record in plain} == {12}

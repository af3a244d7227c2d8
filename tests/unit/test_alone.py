"""Flags that would change nothing beside the others, or without them, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.main import cli
from headrace.errors import ConfigError


def refused(command: str) -> ConfigError:
    """Why the command does not run."""
    result = CliRunner().invoke(cli, command.split())
    assert isinstance(result.exception, ConfigError), result.output
    return result.exception


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--speed 2", "--speed changes nothing without --trace"),
        ("--trace-block-tokens 64", "--trace-block-tokens changes nothing without --trace"),
        ("--trace x --max-tokens 5", "--max-tokens changes nothing beside --trace"),
        ("--trace x --prefixes 5", "--prefixes changes nothing beside --trace"),
        ("--trace x --structured 0.5", "--structured changes nothing beside --trace"),
        ("--burstiness 2", "--burstiness changes nothing without --rate"),
        ("--burst 2 --concurrency 4", "--burst changes nothing without --rate"),
        ("--most-open 2", "--most-open changes nothing without --rate"),
        ("--duration 1 --requests 9", "--requests changes nothing beside --duration"),
        ("--single-prompt x --prompt-tokens 9", "--prompt-tokens changes nothing beside --single"),
        ("--single-prompt x --nonce 9", "--nonce changes nothing beside --single"),
        ("--prefix-tokens 9", "--prefix-tokens changes nothing without --prefixes"),
        ("--drift 9", "--drift changes nothing without --prefixes"),
        ("--prefixes 1 --zipf 1", "--zipf changes nothing without several --prefixes"),
        ("--think 1", "--think changes nothing without --turns or --fan-out"),
        ("--schema x", "--schema changes nothing without --structured"),
        ("--structured 1 --no-ignore-eos", "--ignore-eos changes nothing beside --structured 1"),
        ("--single-prompt x --seed 3", "--seed changes nothing beside --single-prompt"),
        ("--single-prompt x --rate 2 --burstiness 0 --seed 3", "--seed changes nothing beside"),
        ("--name x --requests-out y", "--name changes nothing without --out, --html or --plot"),
        ("--sweep 3 --concurrency 4,8", "--sweep takes one --concurrency"),
    ],
)
def test_bench(flags: str, named: str) -> None:
    assert named in refused(f"bench {flags}").message


@pytest.mark.parametrize(
    "flags",
    [
        "--trace x --speed 2 --trace-block-tokens 64 --most-open 2 --duration 1 --requests 9",
        "--rate 2 --burstiness 2 --burst 2 --most-open 2",
        "--sweep 3 --burst 2 --requests 9 --duration 1",
        "--prefixes 2 --prefix-tokens 9 --drift 9 --zipf 1 --turns 2 --think 1 --nonce 9",
        "--fan-out 2 --think 1 --prompt-tokens 9",
        "--structured 0.5 --schema x --no-ignore-eos --single-prompt x --seed 3",
        "--single-prompt x --seed 3 --rate 2",
        "--single-prompt x --seed 3 --max-tokens uniform:1:9",
        "--single-prompt x --seed 3 --cancel 1",
        "--single-prompt x --seed 3 --turns 2 --think 1",
        "--sweep 3 --concurrency 4 --name x --html y",
    ],
)
def test_bench_beside_what_they_need(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def workload(asked: object) -> None:
        seen.append("passed")
        raise ConfigError("no load is made here")

    monkeypatch.setattr("headrace.cli.bench.workload_of", workload)
    assert "no load" in refused(f"bench {flags}").message
    assert seen == ["passed"]


SIM = "sim --workload cold --requests 3"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--load 0.5 --speed 2", "--speed changes nothing beside --load"),
        ("--policy random,chwbl --affinity 0.5", "--affinity changes nothing without the policy"),
        ("--save-trace x --workers 2", "--workers changes nothing beside --save-trace"),
        ("--save-trace x --policy p2c", "--policy changes nothing beside --save-trace"),
        ("--workers 1 --policy p2c", "--policy changes nothing beside --workers 1"),
        ("--workers 1 --affinity 0.5", "--affinity changes nothing beside --workers 1"),
        ("--save-trace x --out y", "--out changes nothing beside --save-trace"),
    ],
)
def test_sim(flags: str, named: str) -> None:
    assert named in refused(f"{SIM} {flags}").message


def test_sim_beside_what_they_need(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"

    def runs(command: str) -> None:
        ran = CliRunner().invoke(cli, command.split(), catch_exceptions=False)
        assert ran.exit_code == 0, ran.output

    runs(f"{SIM} --seed 3 --save-trace {trace}")
    assert trace.exists()
    runs(f"{SIM} --policy session@order --affinity 0.5")  # which has no sessions
    talk = "sim --workload multi_turn --requests 3 --policy session --affinity 0.5"
    assert "--affinity changes nothing" in refused(talk).message
    given = f"sim --trace {trace} --seed 3"
    assert "--seed changes nothing beside --trace" in refused(given).message
    assert "--seed changes nothing" in refused(f"{given} --save-trace x").message
    runs(f"{given} --policy p2c@order,chwbl")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--prefixes 0 --prefix-tokens 9", "--prefix-tokens changes nothing without --prefixes"),
        ("--only naive --whole 9", "--whole changes nothing beside --only naive"),
    ],
)
def test_ablate(flags: str, named: str) -> None:
    assert named in refused(f"ablate --backend cpu {flags}").message


def test_ablate_beside_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def workload(**fields: object) -> None:
        raise ConfigError("no load is made here")

    monkeypatch.setattr("headrace.cli.ablate.Workload", workload)
    rows = ("--only naive --only overlap", "")
    for flags in (*(f"{row} --whole 9" for row in rows), "--prefixes 1 --prefix-tokens 9"):
        assert "no load" in refused(f"ablate --prompt words --backend cpu {flags}").message


def test_chat() -> None:
    asked = "chat --url http://127.0.0.1:9 --seed 3 hello"
    assert "--seed changes nothing beside" in refused(f"{asked} --temperature 0").message
    for more in ("", " --temperature 0.5"):
        unheard = CliRunner().invoke(cli, (asked + more).split())
        assert "127.0.0.1:9" in unheard.output


@pytest.mark.parametrize(
    "flag", ["--api-key x", "--measure-batch 1,8", "--measure-prompt 9", "--measure-output 9"]
)
def test_plan(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")  # is for other commands too
    error = refused(f"plan --device h100 {flag}")
    assert f"{flag.split()[0]} changes nothing without --url" in error.message


@pytest.mark.parametrize("name", ["ttft", "ttfc", "itl", "tpot"])
def test_limits_of_streams(name: str) -> None:
    flags = f"--slo e2e:9 --slo {name}:9 --no-stream"
    assert f"--slo {name} needs --stream" in refused(f"bench {flags}").message


def test_drain() -> None:
    error = refused("gateway drain http://127.0.0.1:1 --undo --wait-s 5")
    assert "--wait-s changes nothing beside --undo" in error.message


def test_inspect() -> None:
    assert "--context changes nothing without --memory" in refused("inspect --context 9").message


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--dns-server 127.0.0.1:53", "--dns-server changes nothing without a worker"),
        ("--dns-keep-s 5", "--dns-keep-s changes nothing without a worker"),
        ("--redis-url redis://127.0.0.1:1", "no tier of the fleet file has"),
    ],
)
def test_gateway(flags: str, named: str) -> None:
    assert named in refused(f"gateway --worker http://127.0.0.1:1 {flags}").message

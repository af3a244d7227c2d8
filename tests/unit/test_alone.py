"""Flags that would change nothing beside the others, or without them, are refused by name."""

from __future__ import annotations

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
        "--structured 0.5 --schema x",
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

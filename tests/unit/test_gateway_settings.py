"""Settings and fleet files of the gateway."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli.gateway import command
from headrace.errors import ConfigError
from headrace.gateway.policy import POLICIES
from headrace.gateway.registry import FileRegistry
from headrace.gateway.settings import HELP, GatewaySettings, WorkerSpec, merge, read_fleet

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()


def test_flags_win_over_the_file() -> None:
    settings = merge({"port": 1, "affinity": 0.3, "check-interval-s": 2.0}, {"port": 2})
    assert (settings.port, settings.affinity, settings.check_interval_s) == (2, 0.3, 2.0)


@pytest.mark.parametrize(
    ("values", "named"),
    [({"port": 70000}, "port"), ({"nothing": 1}, "nothing"), ({"policy": "best"}, "policy")],
)
def test_bad_settings_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        merge(values, {})


@pytest.mark.parametrize(
    ("alone", "named", "beside"),
    [
        ({"affinity": 0.5, "policy": "random"}, "policy", {"policy": "session"}),
        ({"block_index_bytes": 2**21, "kv_events": False}, "kv_events", {"kv_events": True}),
        ({"tokenizer_threads": 2}, "tokenizer", {"tokenizer": ("m=fake",)}),
        ({"tokenizer_cache_bytes": 2}, "tokenizer", {"tokenizer": ("m=fake",)}),
        ({"starve_s": 2.0, "max_queue": 0}, "max_queue", {"max_queue": 1}),
        ({"lint_excerpts": True, "lint": False}, "lint", {"lint": True}),
        ({"lint_bytes": 2**21, "lint": False}, "lint", {"lint": True}),
        ({"redis_timeout_s": 2.0}, "redis_url", {"redis_url": "redis://x:1"}),
        ({"trace_ratio": 0.5}, "otlp_endpoint", {"otlp_endpoint": "http://x:4318"}),
    ],
)
def test_what_needs_another_setting_is_refused_alone(
    alone: dict[str, Any], named: str, beside: dict[str, Any]
) -> None:
    key = next(iter(alone))
    with pytest.raises(ConfigError, match=f"{key} = .* would change nothing: .*{named}"):
        merge(alone, {})
    merge(alone | beside, {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("workers = 3", "workers"),
        ('[[workers]]\nurl = "http://x"\nca_file = "x.pem"', "ca_file needs https"),
        ('[[workers]]\nurl = "http://x"\nkv_events_topic = "kv"', "needs kv_events_endpoint"),
        (
            '[[workers]]\nurl = "http://x"\nkv_events_replay_endpoint = "tcp://x:1"',
            "needs kv_events_endpoint",
        ),
        (
            '[[workers]]\nurl = "http://x"\n'
            'start = {command = ["x"], warm = true, idle_stop_s = 5}',
            "idle_stop_s",
        ),
        ('[[workers]]\nurl = "ftp://x"', "ftp://x"),
        ('[[workers]]\nurl = "http://x:y"', "http://x:y"),
        ('[[workers]]\nurl = "http://x:0"', "port 0"),
        ('[[workers]]\nurl = "http://x/path"', "without a path"),
        ('[[workers]]\nurl = "http://x"\n[[workers]]\nurl = "http://x:80/"', "twice"),
        ('[[workers]]\nurl = "http://x"\nweight = 1', "weight"),
        ('[[workers]]\nurl = "http://u:p@x"', "without a path"),
        ('[[workers]]\nurl = "http://x#y"', "without a path"),
        ('[[workers]]\nurl = "dnssrv+http://x:99999"', "no URL"),
        ('[[workers]]\nurl = "http://é"', "url: printable ASCII"),
        ('[[workers]]\nurl = "http://x"\napi_key = "a\\n"', "api_key: .* not this"),
        ('[[workers]]\nurl = "http://x"\nhost = "a b"', "host: printable ASCII"),
        ('[[workers]]\nurl = "http://x"\nhost = "[a"', "NAME:PORT"),
        ('[[workers]]\nurl = "http://x"\nhost = "a:b"', "NAME:PORT"),
        ('[[workers]]\nurl = "http://x"\nhost = "http://a"', "NAME:PORT"),
        ('[[workers]]\nurl = "http://x"\nhealth_path = "health"', "from / on"),
        ("[", "not TOML"),
        ("a = " + "[" * 5000, "not TOML"),
    ],
)
def test_bad_fleet_files_are_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_fleet(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_fleet(tmp_path / "none.toml")


def test_the_command_refuses_to_start_without_workers() -> None:
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, ConfigError)
    assert "no workers" in result.exception.message
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "--affinity" in shown


def test_the_file_of_the_page_is_read(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(PAGE.split("```toml\n")[1].split("```")[0])
    fleet = read_fleet(file)
    assert merge(fleet.gateway, {}).port == 8080
    assert [worker.url for worker in fleet.workers] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
    ]


def test_the_page_names_every_policy() -> None:
    assert all(f"`{name}`" in PAGE for name in POLICIES)
    assert set(GatewaySettings.__struct_fields__) == set(HELP)


def test_a_changed_file_changes_the_fleet_and_a_bad_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    seen: list[list[str]] = []

    def write(text: str, stamp: int) -> None:
        file.write_text(text)
        os.utime(file, (stamp, stamp))

    write('[[workers]]\nurl = "http://a"', 1)
    registry = FileRegistry(file, [WorkerSpec(url="http://more")])
    registry.start(lambda specs: seen.append([spec.url for spec in specs]))
    registry.tick()
    write('[[workers]]\nurl = "http://b"', 2)
    registry.tick()
    write("[", 3)
    registry.tick()
    file.unlink()
    registry.tick()
    assert seen == [["http://more", "http://a"], ["http://more", "http://b"]]


def test_a_key_of_a_tier_that_is_not_there_is_found_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[[keys]]\nkey = "a"\ntier = "gone"')
    with pytest.raises(ConfigError, match="gone"):
        read_fleet(file)

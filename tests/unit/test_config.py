"""Settings: layers, sources, and errors that name key, value and place."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import headrace.config
from headrace.cli.main import cli
from headrace.config import SERVING, Settings, Source, load, parse_bytes, refuse
from headrace.errors import ConfigError


def toml(folder: Path, text: str) -> Path:
    file = folder / "headrace.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 1\nmax-queue = 2\nseed = 3\n")
    settings, sources = load(
        {"port": 10}, {"HEADRACE_PORT": "20", "HEADRACE_MAX_QUEUE": "21", "OTHER": "x"}, file
    )
    assert (settings.port, settings.max_queue, settings.seed) == (10, 21, 3)
    assert sources["port"] == Source("flag", "--port")
    assert sources["max_queue"] == Source("environment", "HEADRACE_MAX_QUEUE")
    assert sources["seed"] == Source("file", str(file))
    assert sources["host"] == Source("default", "")


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 1\n")
    assert load({}, {"HEADRACE_CONFIG": str(file)})[0].port == 1
    assert load({}, {"HEADRACE_CONFIG": ""})[0] == Settings()
    other = tmp_path / "other.toml"
    other.write_text("port = 2\n")
    assert load({}, {"HEADRACE_CONFIG": str(file)}, other)[0].port == 2


def test_words_of_the_environment_take_the_type_of_their_setting() -> None:
    environ = {
        "HEADRACE_PREFIX_CACHING": "No",
        "HEADRACE_KEEPALIVE_S": "0.5",
        "HEADRACE_MODEL": "7",
    }
    settings, _ = load({}, environ)
    assert (settings.prefix_caching, settings.keepalive_s, settings.model) == (False, 0.5, "7")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HEADRACE_NO_SUCH": "1"}, ["no_such", "HEADRACE_NO_SUCH"]),
        ({"HEADRACE_PORT": "eighty"}, ["HEADRACE_PORT", "eighty"]),
        ({"HEADRACE_PORT": "65536"}, ["port", "65536", "HEADRACE_PORT"]),
        ({"HEADRACE_RESTART": "perhaps"}, ["HEADRACE_RESTART", "perhaps"]),
        ({"HEADRACE_STALL_TIMEOUT_S": "nan"}, ["stall_timeout_s", "nan"]),
        ({"HEADRACE_CONFIG": "/no/such.toml"}, ["/no/such.toml"]),
    ],
)
def test_a_bad_environment_names_the_variable(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, environ)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nport = 1\n", ["server", "headrace.toml"]),
        ("[engine]\nport = 1\n", ["engine", "{'port': 1}", "headrace.toml"]),
        ("port = '80'\n", ["port", "'80'", "headrace.toml"]),
        ("port = \n", ["headrace.toml", "TOML"]),
        ("max-queue = 1\nmax_queue = 2\n", ["max_queue", "twice"]),
    ],
)
def test_a_bad_file_names_key_and_file(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, {}, toml(tmp_path, text))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"x\.toml is not TOML"):
        load({}, {}, file)


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        ({"kv_blocks": 1, "kv_memory": "1GiB"}, "kv_blocks"),
        ({"kv_memory": "much"}, "kv_memory"),
        ({"kv_events_endpoint": "tcp://*:0"}, "kv_events_endpoint"),
        ({"kv_events_endpoint": "tcp://*:65536"}, "kv_events_endpoint"),
        ({"api_workers": "0"}, "api_workers"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"fake_step_ms": 5.0}, "fake_step_ms"),
        ({"fake_device": "h100-14b"}, "fake_device"),
        ({"fake_device": "h100-14b", "backend": "fake", "fake_step_ms": 1.0}, "fake_device"),
        ({"itl_target_ms": "soon"}, "itl_target_ms"),
        ({"itl_target_ms": -1}, "itl_target_ms"),
        ({"itl_target_ms": float("nan")}, "itl_target_ms"),
        ({"itl_target_ms": True}, "itl_target_ms"),
        ({"api_workers": 1.5}, "api_workers"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"api_timeout_s": 0.0}, "api_timeout_s"),
        ({"engine_timeout_s": 0.0}, "engine_timeout_s"),
        ({"backend": "abacus"}, "backend"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_values_that_cannot_be(flags: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags, {})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("itl-target-ms = 30\napi_workers = 2\n", ("30", "2")),
        ("itl-target-ms = 2.5\napi_workers = 'auto'\n", ("2.5", "auto")),
        ("itl-target-ms = 'auto'\napi_workers = '3'\n", ("auto", "3")),
    ],
)
def test_a_number_or_auto(tmp_path: Path, text: str, values: tuple[str, str]) -> None:
    settings, _ = load({}, {}, toml(tmp_path, text))
    assert (settings.itl_target_ms, settings.api_workers) == values


EVENTS = {"kv_events_endpoint": "tcp://*:5557"}
REPLAY = {**EVENTS, "kv_events_replay_endpoint": "tcp://*:5558"}


@pytest.mark.parametrize(
    ("alone", "named", "beside"),
    [
        ({"kv_events_topic": "kv"}, "kv_events_endpoint", EVENTS),
        ({"kv_events_encoding": "map"}, "kv_events_endpoint", EVENTS),
        ({"kv_events_hwm": 5}, "kv_events_endpoint", EVENTS),
        ({"kv_events_max_queue_size": 5}, "kv_events_endpoint", EVENTS),
        ({"kv_events_replay_endpoint": "tcp://*:5558"}, "kv_events_endpoint", EVENTS),
        ({"kv_events_buffer_steps": 5}, "kv_events_replay_endpoint", REPLAY),
        ({"max_wait_s": 5.0}, "scheduling_policy", {"scheduling_policy": "priority"}),
        ({"response_store_bytes": 5, "response_store_count": 0}, "response_store_count", None),
        ({"response_store_ttl_s": 5.0, "response_store_count": 0}, "response_store_count", None),
        ({"record_bytes": 5, "record_count": 0}, "record_count", None),
        ({"record_bytes": 5, "ui": False}, "ui", {"ui": True}),
        ({"record_count": 5, "ui": False}, "ui", {"record_count": 0}),
        ({"stream_resume_bytes": 5000}, "stream_resume_s", {"stream_resume_s": 5.0}),
        ({"hook_timeout_s": 5.0}, "hook", {"hook": ("moderation=words:words.txt",)}),
        ({"usage_fsync_s": 5.0}, "usage_log", {"usage_log": "usage.jsonl"}),
        ({"trace_ratio": 0.5}, "otlp_endpoint", {"otlp_endpoint": "http://localhost:4318"}),
        ({"check_weights": True, "load_format": "dummy"}, "load_format", {"load_format": "auto"}),
        ({"allow_pickle": True, "load_format": "dummy"}, "load_format", {"load_format": "auto"}),
        ({"fake_step_ms": 5.0}, "backend", {"backend": "fake"}),
        ({"fake_device": "h100-14b"}, "backend", {"backend": "fake"}),
        ({"gpu_memory_utilization": 0.5, "kv_blocks": 9}, "kv_blocks", {"kv_blocks": 0}),
        ({"gpu_memory_utilization": 0.5, "kv_memory": "1GiB"}, "kv_memory", {"kv_memory": ""}),
        ({"max_num_batched_tokens": 99, "engine": "naive"}, "engine", {"engine": "headrace"}),
    ],
)
def test_what_needs_another_setting_is_refused_alone(
    alone: dict[str, Any], named: str, beside: dict[str, Any] | None
) -> None:
    key = next(iter(alone))
    with pytest.raises(ConfigError, match=f"{key} = .* would change nothing: .*{named}") as caught:
        load(alone, {})
    assert caught.value.param == key
    load({key: alone[key]} if beside is None else alone | beside, {})
    load(alone | {key: getattr(Settings(), key)}, {})  # its default asks for nothing


def test_what_the_caller_will_set_is_there() -> None:
    settings, _ = load({"kv_events_topic": "kv"}, {}, supplied=EVENTS)
    assert settings == Settings(kv_events_topic="kv"), "it is not set here"


def test_what_would_be_ignored_is_refused() -> None:
    refuse(Settings(port=1), "this engine", ("dtype", "threads"))
    with pytest.raises(ConfigError, match="this engine cannot honour threads = 3") as caught:
        refuse(Settings(threads=3), "this engine", ("dtype", "threads"))
    assert caught.value.param == "threads"


def _read(path: Path, functions: set[str] | None = None) -> set[str]:
    """Settings that a file reads, or those functions of it and what they call there."""
    tree = ast.parse(path.read_text())
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    open_ = [own[name] for name in functions or ()]
    parts: list[ast.AST] = [tree] if functions is None else []
    while open_:
        parts.append(part := open_.pop())
        called = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
        open_ += [own[name] for name in called & own.keys() if own[name] not in parts + open_]
    found = set()
    for node in itertools.chain.from_iterable(map(ast.walk, parts)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            found |= {node.attr} if owner.endswith("settings") else set()
    return found


def test_what_only_a_server_reads_is_all_that_no_engine_reads() -> None:
    package = Path(headrace.config.__file__).parent
    files = [package / "llm.py", package / "bench/naive.py"]
    for part in ("engine", "runner", "backends", "kv", "sampling"):
        files += (package / part).rglob("*.py")
    of_server = {package / f"engine/{name}.py" for name in ("server", "client")}
    read = _read(package / "launch.py", {"find_model", "build_engine"})
    for path in set(files) - of_server:
        read |= _read(path)
    # `find_model` gives the model its name for answers over HTTP, `backends.choose` counts
    # processes.
    read -= {"served_model_name", "api_workers"}
    assert {*Settings.__struct_fields__} - read == SERVING


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1048576), ("4GiB", 4 * 2**30), ("1.5 mb", 1_500_000), ("2k", 2000), ("9B", 9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "kv_memory") == size


def test_the_command_prints_every_setting_and_hides_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_SEED", "12")
    arguments = ["config", "--backend", "fake", "--api-key", "secret-word"]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert set(lines) == {"setting", *Settings.__struct_fields__}
    assert "secret-word" not in done.output
    assert "environment HEADRACE_SEED" in lines["seed"]
    assert "flag --backend" in lines["backend"]
    assert "the fake device runs beside the host" in lines["overlap"]
    assert "0 -> 8192" in lines["max_model_len"]
    assert "0 -> 64" in lines["max_num_seqs"]
    assert "0 -> 512" in lines["max_num_batched_tokens"]
    assert "auto -> 0" in lines["itl_target_ms"]


def test_the_command_says_what_it_cannot_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for arguments, why in (
        ([], "the model is not on this machine yet"),
        (["/no/such.gguf"], "/no/such.gguf"),
    ):
        done = CliRunner().invoke(cli, ["config", *arguments], catch_exceptions=False)
        assert done.exit_code == 0
        (line,) = [line for line in done.output.splitlines() if line.startswith("kv_blocks")]
        assert why in line


def test_a_list_is_a_repeated_flag_or_commas_or_a_toml_list(tmp_path: Path) -> None:
    assert load({}, {"HEADRACE_API_KEY": "a, b,,"})[0].api_key == ("a", "b")
    assert load({}, {}, toml(tmp_path, "api-key = ['a', 'b']\n"))[0].api_key == ("a", "b")
    assert load({}, {}, toml(tmp_path, "api-key = 'a,b'\n"))[0].api_key == ("a,b",)
    args = ["config", "--api-key", "a", "--api-key", "b", "--cors-origin", "https://a.example"]
    said = CliRunner().invoke(cli, args)
    assert said.exit_code == 0, said.output
    assert "('https://a.example',)" in said.output
    assert "(set)" in said.output


@pytest.mark.parametrize("key", ["two words", "", "sha256:12", "sha256:" + "g" * 64, "naïve"])
def test_a_key_that_cannot_be_one_is_found_at_the_start(key: str) -> None:
    with pytest.raises(ConfigError, match="64 hex digits") as caught:
        load({"api_key": ("good", key)}, {})
    assert not key or key not in str(caught.value)

"""Settings of `headrace serve`: one table from which flags, HEADRACE_* variables, the TOML file,
`headrace config` and the help texts are made. Frozen; every value knows where it came from.

Order: flag, then environment, then TOML file (--config, or HEADRACE_CONFIG), then default. An
unknown key or a bad value raises `ConfigError` with key, value and source. `auto` values are
resolved later, once, by whoever knows the facts (`Resolved` pairs a value with its reason).
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from headrace.draws import parse_defaults
from headrace.errors import ConfigError
from headrace.prices import parse_prices

ENV_PREFIX = "HEADRACE_"
ENV_FILE = "HEADRACE_CONFIG"  # names the TOML file; no setting
_DECIMAL = r"\d+(\.\d+)?"
NUMBER_OR_AUTO = ("api_workers", "itl_target_ms")  # kept as text; a file may give the number
T = TypeVar("T")

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
SomeSeconds = Annotated[float, Meta(gt=0)]
ToolParser = Literal["auto", "none", "hermes", "llama", "mistral", "mistral-args", "pythonic"]
PrefillAttention = Literal["auto", "triton", "cudnn", "flash", "flashinfer"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting with its default. `HELP` says what each one means."""

    model: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    served_model_name: str = ""
    backend: Literal["auto", "fake", "cpu", "cuda"] = "auto"
    engine: Literal["headrace", "naive"] = "headrace"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    allow_pickle: bool = False
    check_weights: bool = False
    quantization: Literal["none", "int8", "int4"] = "none"
    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    cpu_precision: Literal["auto", "exact", "fast"] = "auto"
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    max_model_len: Natural = 0
    max_num_seqs: Natural = 0
    max_num_batched_tokens: Natural = 0
    itl_target_ms: str = "auto"
    block_size: Positive = 16
    kv_blocks: Natural = 0
    kv_memory: str = ""
    prefill_attention: PrefillAttention = "auto"
    cuda_graphs: bool = True
    expert_copies: Literal["auto", "off", "all"] = "auto"
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    prefix_caching: bool = True
    kv_events_endpoint: str = ""
    kv_events_replay_endpoint: str = ""
    kv_events_topic: str = ""
    kv_events_encoding: Literal["array", "map"] = "array"
    kv_events_buffer_steps: Positive = 10_000
    kv_events_hwm: Positive = 100_000
    kv_events_max_queue_size: Positive = 100_000
    scheduling_policy: Literal["fcfs", "priority", "static"] = "fcfs"
    max_wait_s: Seconds = 60.0
    max_queue: Natural = 1024
    overlap: Literal["auto", "on", "off"] = "auto"
    api_workers: str = "auto"
    api_key: tuple[str, ...] = ()
    admin_key: tuple[str, ...] = ()
    ui: bool = True
    api_timeout_s: Annotated[float, Meta(ge=3)] = 10.0  # several beats: one comes each second
    engine_timeout_s: SomeSeconds = 10.0
    shutdown_timeout_s: Seconds = 30.0
    stall_timeout_s: Seconds = 60.0
    receive_timeout_s: SomeSeconds = 60.0
    keepalive_s: SomeSeconds = 15.0
    request_timeout_s: Seconds = 0.0
    first_token_timeout_s: Seconds = 0.0
    max_body_bytes: Positive = 8 * 2**20
    max_streams: Natural = 0
    max_n: Annotated[int, Meta(ge=1, le=128)] = 128
    max_schema_bytes: Annotated[int, Meta(ge=1, le=256 * 1024)] = 256 * 1024
    strict: bool = False
    cors_origin: tuple[str, ...] = ()
    response_store_count: Natural = 1000
    response_store_bytes: Positive = 64 * 2**20
    response_store_ttl_s: SomeSeconds = 3600.0
    record_count: Natural = 200
    record_bytes: Positive = 64 * 2**20
    stream_resume_s: Seconds = 0.0
    stream_resume_bytes: Annotated[int, Meta(ge=4096)] = 2**20
    hook: tuple[str, ...] = ()
    hook_timeout_s: SomeSeconds = 60.0
    restart: bool = False
    threads: Natural = 0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    default_sampling: str = ""
    trust_request_chat_template: bool = False
    tool_parser: ToolParser = "auto"
    reasoning_parser: Literal["auto", "none", "think", "mistral", "seed"] = "auto"
    usage_log: str = ""
    usage_fsync_s: Seconds = 1.0
    usage_details: bool = False
    prices: str = ""
    otlp_endpoint: str = ""
    trace_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    telemetry_s: Seconds = 1.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    fake_step_ms: Annotated[float, Meta(ge=0)] = 0.0
    fake_device: str = ""


HELP: Mapping[str, str] = {
    "model": "GGUF file, model folder, hf:owner/name, pypi:package; none = SmolLM2-135M-Instruct",
    "host": "address to listen on",
    "port": "port to listen on; 0 = any free one",
    "served_model_name": "name in /v1/models and in requests; default: from the source",
    "backend": "what computes: auto, fake (no model, deterministic), cpu, cuda",
    "engine": "headrace, or naive: one transformers generate() at a time, the yardstick",
    "dtype": "type of weights and activations; auto follows the checkpoint and the processor",
    "load_format": "auto reads the checkpoint's weights; dummy draws random ones",
    "allow_pickle": "read a folder whose weights are pickles (pytorch_model.bin); torch's "
    "restricted unpickler takes tensors alone",
    "check_weights": "before weights are loaded, look for values that are NaN or infinite, or "
    "become so in --dtype; reads the checkpoint twice",
    "quantization": "cpu backend, native kernels: int8 or int4 quantises a float checkpoint's "
    "matrices as they are loaded; refused for a GGUF file that is packed already",
    "cpu_kernels": "cpu backend: native (C++, built once, packed weights) or torch; auto = native "
    "if there is a compiler",
    "cpu_precision": "native kernels: activations float (exact) or int8 (fast) before products "
    "with quantised weights; auto = fast unless dtype is float32",
    "kv_dtype": "cpu backend: type of the KV cache, int8 with a scale for each token and head; "
    "auto: bfloat16 with int8 activations, else as dtype",
    "max_model_len": "longest prompt + output in tokens; 0 = what the model and the KV cache allow",
    "max_num_seqs": "sequences that run at once; 0 = what suits the backend",
    "max_num_batched_tokens": "tokens computed in one step, decodes first, the rest for prefill; "
    "0 = what suits the backend",
    "itl_target_ms": "longest step while sequences decode, in milliseconds: prompts wait for it, "
    "except a burst of more prompts than sequences decode; 0 = no limit; auto: from the card",
    "block_size": "tokens in a KV block",
    "kv_blocks": "size of the KV cache in blocks; 0 = from --kv-memory; where layers have windows, "
    "a block is one of a group of layers",
    "kv_memory": "size of the KV cache in bytes, such as 4GiB; empty = a quarter of free memory, "
    "on a GPU from --gpu-memory-utilization",
    "prefill_attention": "cuda backend: attention of prompts by triton; in steps too large for a "
    "graph by cudnn (long first chunks) or flashinfer; in large graphs too by flash (packages that "
    "are not brought along); auto = flash where it is installed, else cudnn where it can",
    "cuda_graphs": "cuda backend: steps of usual sizes are replayed as graphs; off: kernel by "
    "kernel, to see what graphs are worth",
    "expert_copies": "cuda backend, bfloat16 mixtures: the experts once more, exactly, in 12 bits "
    "a number, for steps of few tokens; auto: of as many layers as a KV cache of fair size leaves "
    "memory for, none where --kv-blocks or --kv-memory sizes it; all: of every layer, or no start",
    "gpu_memory_utilization": "share of the GPU's memory to use for everything; --kv-blocks or "
    "--kv-memory size the KV cache instead",
    "prefix_caching": "reuse the KV of equal prompt prefixes",
    "kv_events_endpoint": "publish what enters and leaves the prefix cache here, over ZMQ in the "
    "format of vLLM: tcp://*:5557 binds, tcp://HOST:5557 connects; it tells the tokens of prompts",
    "kv_events_replay_endpoint": "where subscribers ask for events that they missed: tcp://*:5558",
    "kv_events_topic": "topic of the events",
    "kv_events_encoding": "batches and events as msgpack arrays, or as maps like newer vLLM",
    "kv_events_buffer_steps": "newest batches of events that are kept for replay (64 MiB at most)",
    "kv_events_hwm": "batches that ZMQ holds for a subscriber that is slow; more are dropped",
    "kv_events_max_queue_size": "batches that wait to be published; more are dropped, and the gap "
    "in the sequence numbers says so",
    "scheduling_policy": "fcfs, priority (lower = more urgent), or static batches (a baseline)",
    "max_wait_s": "priority policy: a request that waited this long is admitted next",
    "max_queue": "requests that may wait; one more gets 503 with Retry-After; 0 = no waiting",
    "overlap": "plan step N+1 while step N runs",
    "api_workers": "HTTP processes: a number, or auto",
    "admin_key": "as api_key; it also sees the requests of every key on the live page",
    "api_key": "when set, requests need `Authorization: Bearer KEY` or `x-api-key: KEY`; /health "
    "and /ready do not; sha256:HEX stands for the key with that digest",
    "ui": "the live page at /ui, for this machine alone unless there is an --api-key",
    "api_timeout_s": "an HTTP process silent for this long loses its requests",
    "engine_timeout_s": "an engine process silent for this long fails open streams",
    "shutdown_timeout_s": "after SIGTERM, running streams have this long to end",
    "stall_timeout_s": "a client that takes no bytes for this long is dropped",
    "receive_timeout_s": "a client that sends no whole request in this time is dropped",
    "keepalive_s": "seconds of silence after which a stream gets a comment",
    "request_timeout_s": "longest time from a request to the end of its answer; 0 = no limit",
    "first_token_timeout_s": "longest time from a request to its first token; 0 = no limit",
    "max_body_bytes": "largest request body",
    "max_streams": "requests that are answered or wait at once, in all HTTP processes; one more "
    "gets 503 with Retry-After; 0 = no limit but that of the queue",
    "max_n": "most choices of one prompt (n, best_of)",
    "max_schema_bytes": "largest schema, grammar or other description of an answer's form",
    "strict": "refuse unknown fields of a request instead of naming them in a header",
    "cors_origin": "origin whose web pages may call this server (* = all); default: none may",
    "response_store_count": "most responses of /v1/responses that are kept; 0 = none",
    "response_store_bytes": "most bytes that they may take, conversations included",
    "response_store_ttl_s": "seconds after which a kept response is forgotten",
    "record_count": "newest requests that the live page lists, in each HTTP process; 0 = none",
    "record_bytes": "most bytes of those that asked to be recorded in full",
    "stream_resume_s": "seconds that a stream goes on without its client, which may come back with "
    "Last-Event-ID; 0 = none: a client that leaves ends its request",
    "stream_resume_bytes": "newest events of such a stream that are kept for that",
    "hook": "KIND=NAME:TEXT, code before or after the model: moderation, filter, check, score or "
    "cite; see docs/hooks.md",
    "hook_timeout_s": "longest wait for a moderation or scoring hook; beyond it the request fails",
    "restart": "start the engine again when it dies, ever later if it keeps dying, not ending "
    "the server",
    "threads": "compute threads of the cpu backend; 0 = all cores",
    "seed": "base of the seeds drawn for requests that bring none; 0 = from the system",
    "default_sampling": "sampling of requests that do not say, before the model's own: "
    "temperature=0.7,top_p=0.9",
    "trust_request_chat_template": "requests may bring a chat_template; they are rendered in a "
    "process of their own",
    "tool_parser": "form in which the model writes tool calls: auto (from its chat template), none "
    "(no tools), hermes, llama, mistral, mistral-args, pythonic",
    "reasoning_parser": "marks around the model's reasoning: auto (from its chat template), none, "
    "think, mistral, seed",
    "usage_log": "file to which the usage of every request is appended, as a line of JSON each",
    "usage_fsync_s": "a line of the usage log is on the disk after this long; 0 = before the "
    "client sees the end of its answer",
    "usage_details": "show compute_s and cost in `usage.headrace` of answers",
    "prices": "what usage costs: input=0.15,cached=0.075,output=0.6 a million tokens, or "
    "device_hour=2.5; and currency=EUR",
    "otlp_endpoint": "address of an OpenTelemetry collector (OTLP over HTTP): it gets spans of "
    "requests and their stages; needs the extra `tracing`",
    "trace_ratio": "how many of the traces that begin here are recorded, 0 to 1; those that a "
    "caller began are recorded if it says so",
    "telemetry_s": "seconds between readings of processes, machine and GPU for /metrics; 0 = none",
    "log_level": "least severe message that is printed",
    "fake_step_ms": "fake backend: modelled time of one step in milliseconds",
    "fake_device": "fake backend: a device of `headrace sim`, by name or file; steps take its time "
    "and the KV cache has its size",
}
assert set(HELP) == set(Settings.__struct_fields__), "every setting needs one help line"

# Read by the server's processes and by no engine: without effect where an engine runs alone.
SERVING = frozenset({
    "host", "port", "served_model_name", "api_workers", "api_key", "admin_key", "ui",
    "api_timeout_s", "engine_timeout_s", "shutdown_timeout_s", "stall_timeout_s",
    "receive_timeout_s", "keepalive_s", "request_timeout_s", "first_token_timeout_s",
    "max_body_bytes", "max_streams", "max_n", "max_schema_bytes", "strict", "cors_origin",
    "response_store_count", "response_store_bytes", "response_store_ttl_s", "record_count",
    "record_bytes", "stream_resume_s", "stream_resume_bytes", "hook", "hook_timeout_s", "restart",
    "trust_request_chat_template", "tool_parser", "reasoning_parser", "usage_log",
    "usage_fsync_s", "usage_details", "prices", "otlp_endpoint", "trace_ratio", "telemetry_s",
    "log_level",
})  # fmt: skip


class Resolved(msgspec.Struct, Generic[T], frozen=True):
    """A value that was `auto`, and why it is what it is."""

    value: T
    reason: str


class Source(msgspec.Struct, frozen=True):
    """Where a setting's value came from, for `headrace config` and for error messages."""

    kind: Literal["flag", "environment", "file", "default"]
    name: str  # --port, HEADRACE_PORT, headrace.toml, or ""


def is_list(key: str) -> bool:
    """The setting holds several texts: a flag that may be repeated, a TOML list (or one text)."""
    return type(getattr(_DEFAULTS, key)) is tuple


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def flag_of(key: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + key.replace("_", "-")


class Need(NamedTuple):
    """`keys` have an effect only where `met`, of the settings that they belong to; `words` say
    when that is."""

    keys: tuple[str, ...]
    met: Callable[[Any], bool]
    words: str


_EVENTS = (
    "kv_events_replay_endpoint", "kv_events_topic", "kv_events_encoding", "kv_events_hwm",
    "kv_events_max_queue_size",
)  # fmt: skip
_KEPT_EVENTS = ("kv_events_buffer_steps",)
KV_EVENTS = ("kv_events_endpoint", *_EVENTS, *_KEPT_EVENTS)
_NEEDS = (
    Need(_EVENTS, lambda s: bool(s.kv_events_endpoint), "kv_events_endpoint"),
    Need(_KEPT_EVENTS, lambda s: bool(s.kv_events_replay_endpoint), "kv_events_replay_endpoint"),
    Need(
        ("max_wait_s",),
        lambda s: s.scheduling_policy == "priority",
        "scheduling_policy = priority",
    ),
    Need(("max_num_batched_tokens",), lambda s: s.engine == "headrace", "engine = headrace"),
    Need(
        ("response_store_bytes", "response_store_ttl_s"),
        lambda s: s.response_store_count > 0,
        "a response_store_count above 0",
    ),
    Need(("record_count",), lambda s: s.ui or not s.record_count, "ui"),
    Need(("record_bytes",), lambda s: s.ui and s.record_count > 0, "ui, a record_count above 0"),
    Need(("stream_resume_bytes",), lambda s: s.stream_resume_s > 0, "a stream_resume_s above 0"),
    Need(("hook_timeout_s",), lambda s: bool(s.hook), "a hook"),
    Need(("usage_fsync_s",), lambda s: bool(s.usage_log), "usage_log"),
    Need(("trace_ratio",), lambda s: bool(s.otlp_endpoint), "otlp_endpoint"),
    Need(
        ("check_weights", "allow_pickle"),
        lambda s: s.load_format != "dummy",
        "weights of the checkpoint, not load_format = dummy",
    ),
    Need(("fake_step_ms", "fake_device"), lambda s: s.backend == "fake", "backend = fake"),
    Need(
        ("gpu_memory_utilization",),
        lambda s: not (s.kv_blocks or s.kv_memory),
        "that neither kv_blocks nor kv_memory sizes the KV cache",
    ),
)


def check_needs(settings: msgspec.Struct, needs: Collection[Need]) -> None:
    """Raise ConfigError for a setting that is not its default and that another one leaves without
    effect; it names both."""
    for keys, met, words in needs:
        if met(settings):
            continue
        for field in msgspec.structs.fields(settings):
            value = getattr(settings, field.name)
            if field.name in keys and value != field.default:
                raise ConfigError(
                    f"{field.name} = {value!r} would change nothing: it needs {words}",
                    param=field.name,
                )


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    supplied: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Settings, dict[str, Source]]:
    """Merge the layers and validate once.

    `flags` holds only what the user gave; `file` is the TOML file, None for HEADRACE_CONFIG's;
    `supplied`: what the caller will set for who does not, so that what needs it has an effect.
    Returns the settings and the source of each. Raises ConfigError naming key, value and source.
    """
    values: dict[str, Any] = {}
    sources = {key: Source("default", "") for key in Settings.__struct_fields__}

    def put(key: str, value: Any, kind: Literal["flag", "environment", "file"], name: str) -> None:
        if key not in sources:
            raise ConfigError(f"unknown setting {key!r} ({kind} {name})", param=key)
        if key in NUMBER_OR_AUTO and type(value) in (int, float):
            value = str(value)
        if is_list(key) and isinstance(value, str):
            value = (value,)
        values[key], sources[key] = value, Source(kind, name)

    file = file or (Path(environ[ENV_FILE]) if environ.get(ENV_FILE) else None)
    for written, value in (_read_toml(file) if file else {}).items():
        key = written.replace("-", "_")
        if key in values:
            raise ConfigError(f"{file} sets {key} twice: with a dash and without", param=key)
        put(key, value, "file", str(file))
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and name != ENV_FILE:
            put(name.removeprefix(ENV_PREFIX).lower(), _from_text(name, text), "environment", name)
    for key, value in flags.items():
        put(key, value, "flag", flag_of(key))
    settings = _validate(values, sources)
    more = {key: value for key, value in supplied.items() if not getattr(settings, key)}
    check_needs(msgspec.structs.replace(settings, **more), _NEEDS)
    return settings, sources


def _validate(values: dict[str, Any], sources: Mapping[str, Source]) -> Settings:
    for key, value in values.items():  # one at a time, so that the message can name the source
        try:
            msgspec.convert({key: value}, Settings)
        except msgspec.ValidationError as error:
            source = sources[key]
            raise ConfigError(
                f"{key} = {value!r} ({source.kind} {source.name}): {error}".split(" - at `")[0],
                param=key,
            ) from None
    settings = msgspec.convert(values, Settings)
    if settings.kv_blocks and settings.kv_memory:
        raise ConfigError("kv_blocks and kv_memory exclude each other: set one", param="kv_blocks")
    parse_defaults(settings.default_sampling)
    parse_prices(settings.prices)
    if settings.kv_memory:
        parse_bytes(settings.kv_memory, "kv_memory")
    if settings.api_workers != "auto" and not re.fullmatch(r"[1-9]\d*", settings.api_workers):
        raise ConfigError(
            f"api_workers = {settings.api_workers!r}: a number from 1, or auto", param="api_workers"
        )
    if settings.itl_target_ms != "auto" and not re.fullmatch(_DECIMAL, settings.itl_target_ms):
        raise ConfigError(
            f"itl_target_ms = {settings.itl_target_ms!r}: milliseconds from 0, or auto",
            param="itl_target_ms",
        )
    if 0 < settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens = {settings.max_num_batched_tokens} is below max_num_seqs = "
            f"{settings.max_num_seqs}: a step must hold one token of every running sequence",
            param="max_num_batched_tokens",
        )
    _check_keys("api_key", settings.api_key)
    _check_keys("admin_key", settings.admin_key)
    check_endpoint(settings.otlp_endpoint)
    _check_kv_events(settings)
    if settings.fake_device and settings.fake_step_ms:
        raise ConfigError("fake_device and fake_step_ms exclude each other", param="fake_device")
    return settings


def _check_kv_events(settings: Settings) -> None:
    for key in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        address = getattr(settings, key)
        if address and not re.fullmatch(r"(tcp://.+:\d{1,5}|ipc://.+)", address):
            raise ConfigError(f"{key} = {address!r}: tcp://HOST:PORT or ipc://PATH", param=key)
        port = int(address.rpartition(":")[2]) if address.startswith("tcp://") else 1
        if not 1 <= port <= 65535:  # of one that the system chooses nobody would know
            raise ConfigError(f"{key} = {address!r}: a port is 1 to 65535", param=key)
    if settings.kv_events_endpoint and (
        not settings.prefix_caching or settings.engine != "headrace"
    ):
        raise ConfigError(
            "kv_events_endpoint: there is no prefix cache to tell of", param="kv_events_endpoint"
        )


def check_endpoint(url: str) -> None:
    """Raises ConfigError for an otlp_endpoint that is no address."""
    if url and not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", url):
        raise ConfigError(
            f"otlp_endpoint = {url!r}: an address such as http://localhost:4318",
            param="otlp_endpoint",
        )


def _check_keys(setting: str, keys: Collection[str]) -> None:
    """What cannot be a key of HTTP is found at the start; the message does not quote it."""
    for key in keys:
        if key.startswith("sha256:"):
            fits = re.fullmatch(r"[0-9a-fA-F]{64}", key.removeprefix("sha256:")) is not None
        else:
            fits = re.fullmatch(r"[\x21-\x7e]+", key) is not None
        if not fits:
            raise ConfigError(
                f"{setting}: printable ASCII characters without blanks, or sha256: and 64 hex "
                "digits",
                param=setting,
            )


def refuse(settings: Settings, who: str, keys: Collection[str]) -> None:
    """Raise ConfigError if one of `keys`, which `who` would have to ignore, is not its default."""
    for key in keys:
        value = getattr(settings, key)
        if value != getattr(_DEFAULTS, key):
            raise ConfigError(f"{who} cannot honour {key} = {value!r}", param=key)


def _from_text(name: str, text: str) -> Any:
    """The value of an environment variable, by the type of the setting's default."""
    default = getattr(_DEFAULTS, name.removeprefix(ENV_PREFIX).lower(), "")
    readers: dict[type, Callable[[str], Any]] = {
        int: int, float: float, bool: _bool, str: str, tuple: _several,
    }  # fmt: skip
    try:
        return readers[type(default)](text)
    except ValueError:
        raise ConfigError(f"{name} = {text!r}: not a {type(default).__name__}") from None


def _bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _several(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None


def parse_bytes(text: str, key: str) -> int:
    """`4GiB`, `500MB`, `1048576` -> bytes. Raises ConfigError naming `key`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{key} = {text!r}: a size such as 4GiB or 500MB", param=key)
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


_DEFAULTS = Settings()

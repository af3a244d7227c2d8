"""Settings of `headrace gateway`: flags, a table of the fleet file, defaults; and the fleet file.

The fleet file is TOML: `[gateway]` holds the settings below, `[[workers]]` the workers, `[[keys]]`
and `[tiers.NAME]` who may come in and how often. See docs/gateway.md.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from headrace.config import Need, check_endpoint, check_needs
from headrace.errors import ConfigError
from headrace.extras import install
from headrace.gateway import trust
from headrace.gateway.starts import StartSpec
from headrace.gateway.tenants import Doorkeeper, KeySpec, TierSpec

PolicyName = Literal[
    "token_cost",
    "random",
    "round_robin",
    "least_requests",
    "least_tokens",
    "p2c",
    "prefix_affinity",
    "weighted",
    "chwbl",
    "session",
]
Seconds = Annotated[float, Meta(ge=0)]
SomeSeconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
PORTS = {"http": 80, "https": 443}
LOOKUPS = frozenset({"dns", "dnssrv"})  # before a worker's url: it is a name of workers


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting with its default. `HELP` says what each one means."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    policy: PolicyName = "token_cost"
    affinity: Share = 0.75
    decode_weight: Annotated[float, Meta(ge=0)] = 0.03
    index_bytes: Annotated[int, Meta(ge=2**20)] = 256 * 2**20
    kv_events: bool = True
    block_index_bytes: Annotated[int, Meta(ge=2**20)] = 256 * 2**20
    tokenizer: tuple[str, ...] = ()
    tokenizer_threads: Positive = 1
    tokenizer_cache_bytes: Natural = 64 * 2**20
    dns_interval_s: SomeSeconds = 30.0
    dns_keep_s: Seconds = 600.0
    dns_server: str = ""
    check_interval_s: SomeSeconds = 1.0
    check_timeout_s: SomeSeconds = 1.5
    hung_after_s: SomeSeconds = 4.0
    slow_start_s: Seconds = 10.0
    breaker_failures: Positive = 5
    breaker_open_s: SomeSeconds = 2.0
    connect_timeout_s: SomeSeconds = 2.0
    retries: Natural = 2
    max_queue: Natural = 1024
    starve_s: SomeSeconds = 10.0
    request_timeout_s: Seconds = 1800.0
    receive_timeout_s: SomeSeconds = 60.0
    stall_timeout_s: SomeSeconds = 60.0
    max_body_bytes: Positive = 32 * 2**20
    shutdown_timeout_s: Seconds = 30.0
    ask_usage: bool = True
    decisions: Natural = 2000
    ui: bool = True
    lint: bool = True
    lint_excerpts: bool = False
    lint_bytes: Annotated[int, Meta(ge=2**20)] = 16 * 2**20
    redis_url: str = ""
    redis_timeout_s: SomeSeconds = 0.05
    otlp_endpoint: str = ""
    trace_ratio: Share = 1.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


HELP: Mapping[str, str] = {
    "host": "address to listen on",
    "port": "port to listen on; 0 = any free one",
    "processes": "so many behind the one port, sharing the load of workers; limits then need "
    "redis_url",
    "policy": "how a worker is chosen; see docs/gateway.md",
    "affinity": "token_cost: 0 = by load alone, 0.5 = a cached token weighs as much as a waiting "
    "one, 1 = by cache alone",
    "decode_weight": "prefill tokens that a token of a decoding context counts as",
    "index_bytes": "most memory of the prefix index",
    "kv_events": "listen to workers that publish what their caches hold",
    "block_index_bytes": "most memory of what they say",
    "tokenizer": "NAME=SOURCE: prompts for the model NAME are tokenised here, as the model at "
    "SOURCE (a folder, a GGUF file, hf:owner/name) would; may be repeated",
    "tokenizer_threads": "threads that do it",
    "tokenizer_cache_bytes": "most memory of pieces of prompts whose tokens are remembered",
    "dns_interval_s": "longest time until a name of workers is asked for again; sooner if its "
    "records live shorter",
    "dns_keep_s": "workers of a name that no longer resolves are kept this long",
    "dns_server": "ADDRESS:PORT of the DNS server that is asked; empty = as /etc/resolv.conf says",
    "check_interval_s": "time between two checks of a worker",
    "check_timeout_s": "a check that takes longer has failed: no new requests until one succeeds",
    "hung_after_s": "a worker that answers no check and sends nothing for this long has its "
    "requests ended; raise it for servers whose /health waits for a long prompt",
    "slow_start_s": "a worker that came (back) gets its full share after this long",
    "breaker_failures": "connect errors, 5xx and timeouts in a row that take a worker out",
    "breaker_open_s": "until it is tried again, with one request",
    "connect_timeout_s": "longest time to connect to a worker",
    "retries": "other attempts for a request of whose answer nothing was sent yet",
    "max_queue": "requests that may wait for a worker with room (see max_requests of a worker)",
    "starve_s": "one that has waited this long is next, whatever its tenant's priority",
    "request_timeout_s": "longest time from a request to the end of its answer; 0 = no limit",
    "receive_timeout_s": "a client that sends no whole request in this time is dropped",
    "stall_timeout_s": "a client that takes no bytes for this long is dropped",
    "max_body_bytes": "largest request body",
    "shutdown_timeout_s": "after SIGTERM, running requests have this long to end",
    "ask_usage": "ask workers for the usage of streams; the client sees it only if it asked too",
    "decisions": "newest decisions kept for /gateway/decisions",
    "lint": "look for prompts that could share more of their beginning: /gateway/lint",
    "lint_excerpts": "show the few characters by which such prompts part; else only the place",
    "lint_bytes": "most memory of the prompts that others are compared with",
    "ui": "serve the fleet page at /gateway/ui: without keys, on a loopback address alone",
    "redis_url": "redis://HOST:PORT of a Redis or Valkey server through which several gateways "
    "share the limits of tenants; empty = every gateway has limits of its own",
    "redis_timeout_s": "a server of limits that takes longer is lost: each gateway then goes on "
    "with an even share of the limits",
    "otlp_endpoint": "address of an OpenTelemetry collector (OTLP over HTTP): it gets spans of "
    "requests and of the workers that were asked; needs the extra `tracing`",
    "trace_ratio": "how many of the traces that begin here are recorded, 0 to 1; those that a "
    "caller began are recorded if it says so",
    "log_level": "least severe message that is printed",
}
assert set(HELP) == set(GatewaySettings.__struct_fields__), "every setting needs one help line"

_NEEDS = (
    Need(
        ("affinity",),
        lambda s: s.policy in ("token_cost", "session"),
        "policy = token_cost or session",
    ),
    Need(("block_index_bytes",), lambda s: s.kv_events, "kv_events"),
    Need(
        ("tokenizer_threads", "tokenizer_cache_bytes"), lambda s: bool(s.tokenizer), "a tokenizer"
    ),
    Need(("starve_s",), lambda s: s.max_queue > 0, "a max_queue above 0"),
    Need(("lint_excerpts", "lint_bytes"), lambda s: s.lint, "lint"),
    Need(("redis_timeout_s",), lambda s: bool(s.redis_url), "redis_url"),
    Need(("trace_ratio",), lambda s: bool(s.otlp_endpoint), "otlp_endpoint"),
)


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker as the operator names it."""

    url: str
    models: tuple[str, ...] = ()  # none = what it says in /v1/models
    api_key: str = ""  # sent to it
    health_path: str = "/health"
    max_requests: Natural = 0  # more wait in the gateway; 0 = no limit
    cache_tokens: Natural = 0  # size of its KV cache; 0 = not known
    hung_after_s: Annotated[float, Meta(gt=0)] | None = None  # None = the gateway's
    kv_events_endpoint: str = ""  # as one connects to it; "" = what its /v1/models says, if it does
    kv_events_replay_endpoint: str = ""
    kv_events_topic: str = ""
    start: StartSpec | None = None  # a worker that the gateway runs itself
    host: str = (
        ""  # what it is told as Host, and has to be called by its certificate; "" = the url's
    )
    ca_file: str = ""  # certificates that https to it trusts; "" = the system's

    @property
    def lookup(self) -> str:
        """ "dns" or "dnssrv": its url is a name of workers; "" = a worker's own."""
        kind, plus, _ = self.url.partition("+")
        return kind if plus and kind in LOOKUPS else ""

    @property
    def secure(self) -> bool:
        """It is spoken to by TLS."""
        return self.url.removeprefix(f"{self.lookup}+").startswith("https:")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port. Raises ConfigError unless the url is http[s]://host[:port], or a name."""
        try:
            parts = urlsplit(self.url.removeprefix(f"{self.lookup}+"))
            port = parts.port
        except ValueError:
            raise ConfigError(f"worker {self.url!r}: no URL", param="workers") from None
        more = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
        if parts.scheme not in PORTS or not parts.hostname or more:
            raise ConfigError(
                f"worker {self.url!r}: http://HOST:PORT or https://HOST:PORT, without a path",
                param="workers",
            )
        if port == 0:
            raise ConfigError(f"worker {self.url!r}: nobody listens at port 0", param="workers")
        return parts.hostname, port or PORTS[parts.scheme]


class FleetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fleet file, decoded."""

    gateway: dict[str, Any] = {}
    workers: tuple[WorkerSpec, ...] = ()
    keys: tuple[KeySpec, ...] = ()
    tiers: dict[str, TierSpec] = {}


def read_fleet(path: Path) -> FleetFile:
    """Read and check a fleet file. Raises ConfigError naming what is wrong."""
    try:
        fleet = msgspec.convert(tomllib.loads(path.read_text()), FleetFile)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", param="config") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", param="config") from None
    check_workers(fleet.workers)
    Doorkeeper(fleet.keys, fleet.tiers)
    return fleet


def check_workers(workers: tuple[WorkerSpec, ...]) -> None:
    """Raises ConfigError for a URL that is none, or that comes twice, for a worker that is to be
    started on demand and does not say for which models, and for a name that cannot be asked for."""
    seen = set()
    for spec in workers:
        place = (spec.lookup, spec.address)
        _check_written(spec)
        if spec.lookup:
            _check_lookup(spec)
        if spec.start is not None and not spec.start.warm and not spec.models:
            raise ConfigError(
                f"worker {spec.url}: one that starts on demand needs `models`", param="workers"
            )
        _check_beside(spec)
        if spec.secure:
            trust.load(spec.ca_file)
        if place in seen:
            raise ConfigError(f"worker {spec.url} is named twice", param="workers")
        seen.add(place)


def _check_written(spec: WorkerSpec) -> None:
    """What stands in every request to it, and could break the lines there."""
    for name in ("url", "api_key", "host", "health_path"):
        value = getattr(spec, name)
        if not (value.isascii() and value.isprintable()) or " " in value:
            shown = "this" if name == "api_key" else repr(value)
            raise ConfigError(
                f"worker {spec.url!r}: {name}: printable ASCII without blanks, not {shown}",
                param="workers",
            )
    if not spec.health_path.startswith("/"):
        raise ConfigError(
            f"worker {spec.url}: health_path = {spec.health_path!r}: a path, from / on",
            param="workers",
        )
    if spec.host:
        try:
            parts = urlsplit(f"//{spec.host}")
            named = parts.netloc == spec.host and parts.hostname and parts.port != 0
        except ValueError:
            named = False
        if not named or "@" in spec.host:
            raise ConfigError(
                f"worker {spec.url}: host = {spec.host!r}: NAME or NAME:PORT", param="workers"
            )


def _check_beside(spec: WorkerSpec) -> None:
    """What changes nothing beside the rest of its table."""
    alone = {
        "ca_file needs https": spec.ca_file and not spec.secure,
        "kv_events_replay_endpoint needs kv_events_endpoint": spec.kv_events_replay_endpoint
        and not spec.kv_events_endpoint,
        "kv_events_topic needs kv_events_endpoint": spec.kv_events_topic
        and not spec.kv_events_endpoint,
        "start: idle_stop_s is for workers that are not warm": spec.start is not None
        and spec.start.warm
        and spec.start.idle_stop_s,
    }
    for what, found in alone.items():
        if found:
            raise ConfigError(f"worker {spec.url}: {what}", param="workers")


def _check_lookup(spec: WorkerSpec) -> None:
    if importlib.util.find_spec("dns") is None:
        raise ConfigError(
            f"worker {spec.url}: names need dnspython: {install('dns')}",
            param="workers",
        )
    if spec.start is not None:
        raise ConfigError(f"worker {spec.url}: a name cannot be started", param="workers")
    if spec.lookup == "dnssrv" and urlsplit(spec.url).port is not None:
        raise ConfigError(
            f"worker {spec.url}: SRV records bring the port: name none", param="workers"
        )


def merge(file: Mapping[str, Any], flags: Mapping[str, Any]) -> GatewaySettings:
    """Flags over the file's table over defaults. Raises ConfigError naming key and value."""
    values = {key.replace("-", "_"): value for key, value in file.items()} | dict(flags)
    try:
        settings = msgspec.convert(values, GatewaySettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"gateway settings: {error}") from None
    check_endpoint(settings.otlp_endpoint)
    check_needs(settings, _NEEDS)
    if settings.dns_server:
        dns_server(settings.dns_server)
    return settings


def dns_server(text: str) -> tuple[str, int]:
    """ADDRESS or ADDRESS:PORT, IPv6 in brackets. Raises ConfigError."""
    try:
        parts = urlsplit(f"//{text}")
        address = str(ip_address(parts.hostname or ""))
        return address, parts.port or 53
    except ValueError:
        raise ConfigError(
            f"dns_server = {text!r}: ADDRESS:PORT, with an address of digits", param="dns_server"
        ) from None

"""docs/metrics.md names every metric that is exported, with its type and labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
from prometheus_client import CollectorRegistry

from headrace.gateway.fleet import Fleet
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.queue import Queue
from headrace.gateway.settings import GatewaySettings
from headrace.messages import KernelsInfo
from headrace.observe.aliases import ALIASES
from headrace.observe.metrics import ApiMetrics, EngineMetrics
from headrace.observe.span_outlet import Books
from headrace.observe.telemetry import DeviceMetrics, HostMetrics, TokenEnergy
from headrace.stages import STAGES

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `([\w:]+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]+) \|$", re.MULTILINE)


class Family(NamedTuple):
    """What a row says of a metric."""

    kind: str
    labels: frozenset[str]


def on_the_wire(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def families(registry: CollectorRegistry) -> dict[str, Family]:
    """By the name that /metrics has."""
    found = {}
    for collector in registry._collector_to_names:
        for family in cast(Any, collector).collect():
            source = collector if hasattr(collector, "_labelnames") else family
            labels = frozenset(cast(Any, source)._labelnames)
            found[on_the_wire(family.name, family.type)] = Family(family.type, labels)
    return found


def exported() -> dict[str, Family]:
    registry = CollectorRegistry()
    engine = EngineMetrics("m", 16, registry)
    engine.describe_kernels(msgspec.structs.asdict(KernelsInfo("cpu", "torch", "x", "exact", "")))
    ApiMetrics("m", registry)
    HostMetrics(registry)
    DeviceMetrics(registry)
    TokenEnergy(registry)
    Books(1, registry)
    found = families(registry)
    for alias in ALIASES:
        kind = next(found[x] for x in (alias.source, f"{alias.source}_total") if x in found)
        labels = {alias.renamed.get(label, label) for label in kind.labels} | {"engine"}
        found[on_the_wire(alias.name, kind.kind)] = Family(kind.kind, frozenset(labels))
    gateway = GatewayMetrics(Fleet(GatewaySettings()), Queue(1, 1.0))
    return found | families(gateway.registry)


def documented() -> dict[str, Family]:
    rows = ROW.findall(PAGE)
    assert len(rows) == len({row[0] for row in rows}), "a name has two rows"
    return {
        name: Family(kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, _, labels, _ in rows
    }


def test_every_metric_is_on_the_page_and_every_row_is_a_metric() -> None:
    found, said = exported(), documented()
    assert said.keys() - found.keys() == set(), "not exported"
    assert found.keys() - said.keys() == set(), "not documented"
    assert {name for name in said if said[name] != found[name]} == set(), "type or labels differ"


def test_units_are_those_of_the_names() -> None:
    """A name that ends with a unit has that unit in its row."""
    units = ("seconds", "bytes", "tokens", "joules", "watts", "hertz", "celsius", "ratio", "cores")
    for name, _, unit, _, _ in ROW.findall(PAGE):
        last = name.removesuffix("_total").rsplit("_", 1)[-1]
        if last in units and name.startswith("headrace_"):
            assert last == unit, name


def test_every_stage_has_a_metric() -> None:
    assert {stage.metric for stage in STAGES} <= documented().keys()

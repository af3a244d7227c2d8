"""The Grafana dashboard against Grafana's own published schema (its Foundation SDK for Python).

tests/e2e/test_observability.py asks its queries of a real Prometheus. No Grafana draws it here.
"""

from __future__ import annotations

import copy
import enum
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

FOLDER = Path(__file__).parents[2] / "deploy" / "observability" / "grafana"
BOARD = json.loads((FOLDER / "dashboards" / "headrace.json").read_text())
COLUMNS = 24  # of Grafana's grid
# Grafana writes it beside the query of a variable; its schema does not know it.
UNKNOWN_TO_THE_SCHEMA = {"definition"}


def unknown(given: Any, known: Any, path: str = "") -> Iterator[str]:
    """Fields of `given` that are not in `known`, which is what the schema's classes made of it."""
    if isinstance(given, dict):
        for name, value in given.items():
            if name in known:
                yield from unknown(value, known[name], f"{path}.{name}")
            elif value not in ({}, [], None) and name not in UNKNOWN_TO_THE_SCHEMA:
                yield f"{path}.{name}"
    elif isinstance(given, list):
        for i, (value, other) in enumerate(zip(given, known, strict=True)):
            yield from unknown(value, other, f"{path}[{i}]")
    elif given != known:
        yield path


def misfits(found: object, path: str = "") -> Iterator[str]:
    """Fields of the schema's objects whose value is not of their type."""
    if isinstance(found, list):
        for i, one in enumerate(found):
            yield from misfits(one, f"{path}[{i}]")
    elif type(found).__module__.startswith("grafana_foundation_sdk"):
        hints = typing.get_type_hints(type(found))
        for name, value in vars(found).items():
            if not fits(value, hints[name]):
                yield f"{path}.{name}: {value!r}"
            yield from misfits(value, f"{path}.{name}")


def fits(value: object, hint: Any) -> bool:
    """Scalars, enumerations and unions of them; of other types anything."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if not isinstance(hint, type):
        return True
    if issubclass(hint, enum.Enum):
        return value in {one.value for one in hint}
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, types.NoneType) else True


def faults(board: dict[str, Any]) -> list[str]:
    register_default_plugins()
    found = Dashboard.from_json(board)
    return [*unknown(board, json.loads(JSONEncoder().encode(found))), *misfits(found)]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def test_every_field_and_value_is_one_of_the_schema() -> None:
    assert faults(BOARD) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("panels", 1, "titel"), "Throughput"),
        (("panels", 1, "options", "legend", "displayMode"), "lines"),
        (("panels", 1, "options", "legend", "showLegend"), "yes"),
        (("panels", 1, "fieldConfig", "defaults", "custom", "lineWith"), 2),
        (("panels", 1, "targets", 0, "legendFromat"), "x"),
        (("panels", 1, "gridPos", "w"), "6"),
        (("graphTooltip",), 7),
        (("templating", "list", 1, "type"), "querry"),
    ],
)
def test_what_grafana_would_not_know_is_found(path: tuple[Any, ...], value: Any) -> None:
    board = place = copy.deepcopy(BOARD)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert faults(board)


def test_units_are_grafanas() -> None:
    known = {value for value in vars(units).values() if isinstance(value, str)}
    used = {panel["fieldConfig"]["defaults"].get("unit", "short") for panel in panels()}
    assert used <= known


def test_variables_are_defined_and_used() -> None:
    defined = {one["name"] for one in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD["panels"])))
    assert used == defined | {"__rate_interval"}
    sources = re.findall(r'"uid": "([^"]+)"', json.dumps([BOARD["panels"], BOARD["templating"]]))
    assert set(sources) == {"${datasource}"}


def test_no_panel_lies_on_another() -> None:
    places: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not places & cells, panel["title"]
        places |= cells


def test_what_provisioning_names_is_what_compose_gives() -> None:
    services = yaml.safe_load((FOLDER.parent / "docker-compose.yml").read_text())["services"]
    mounts = {}
    for name, service in services.items():
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            assert not source.startswith(".") or (FOLDER.parent / source).exists(), volume
            mounts[name, target] = source
    (provider,) = _read("dashboards/headrace.yml")["providers"]
    assert mounts["grafana", provider["options"]["path"]] == "./grafana/dashboards"
    assert mounts["grafana", "/etc/grafana/provisioning"] == "./grafana/provisioning"
    (source,) = _read("datasources/prometheus.yml")["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    name, port = source["url"].removeprefix("http://").split(":")
    assert services[name]["ports"] == [f"127.0.0.1:{port}:{port}"]
    scraped = yaml.safe_load((FOLDER.parent / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraped["scrape_interval"], "of $__rate_interval"


def _read(name: str) -> Any:
    return yaml.safe_load((FOLDER / "provisioning" / name).read_text())

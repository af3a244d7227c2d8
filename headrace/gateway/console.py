"""What an operator asks of a gateway: rows about workers, queue, tenants and decisions.

Each is a plain value. What one process alone knows is asked of all (`joined` puts it together), so
that an operator sees one gateway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from headrace.errors import InvalidRequest, NotFound
from headrace.gateway.decisions import Decisions
from headrace.gateway.event_feed import State
from headrace.gateway.fleet import Fleet
from headrace.gateway.lint import Lint
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.queue import Queue
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.tenants import Doorkeeper, Tenant
from headrace.gateway.worker import Worker

Said = dict[str, Any]
MOST_ROWS = 1000
STATES: tuple[State, ...] = ("exact", "degraded", "fallback")
OUTCOMES = ("equal", "under", "over", "silent_misses")
ROWS = 50  # unless the query says otherwise


class Console:
    """Routes of GET that need an operator's key."""

    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        queue: Queue,
        doorkeeper: Doorkeeper,
        decisions: Decisions,
        lint: Lint | None,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings, self._fleet, self._queue = settings, fleet, queue
        self._doorkeeper, self._decisions, self._lint = doorkeeper, decisions, lint
        self._metrics = metrics
        self.routes: dict[str, Callable[[bytes], Said]] = {
            "/gateway/workers": self._workers,
            "/gateway/queue": self._waiting,
            "/gateway/tenants": self._tenants,
            "/gateway/decisions": self._newest,
            "/gateway/lint": self._linted,
            "/gateway/predictions": self._predicted,
        }

    def tell(self, target: bytes) -> Said:
        """What a route says; target: path and query. Raises InvalidRequest for another query."""
        path, _, query = target.partition(b"?")
        return self.routes[path.decode("latin-1")](query)

    def _workers(self, query: bytes) -> Said:
        _asked(query)
        now_s = time.monotonic()
        rows = [self._worker(worker, now_s) for worker in self._fleet.workers.values()]
        names = [
            {"name": n.url, "workers": len(n.targets), "age_s": n.age_s(now_s), "why": n.why}
            for n in self._fleet.registry.names
        ]
        return {"policy": self._settings.policy, "workers": rows, "names": names}

    def _worker(self, worker: Worker, now_s: float) -> Said:
        state = "up" if worker.up else "down"
        return {
            **msgspec.to_builtins(worker.view(now_s)),
            "state": "draining" if worker.draining else state,
            "why": worker.why,
            "breaker": worker.breaker.state,
            "index": self._fleet.beliefs.state(worker.name),
            "kv_events": self._fleet.beliefs.tell(worker.name),
            "max_requests": worker.spec.max_requests,
            "models": worker.models,
            "start": worker.start and {"state": worker.start.state, "why": worker.start.why},
        }

    def _waiting(self, query: bytes) -> Said:
        _asked(query)
        tenants = self._doorkeeper.tenants
        lines = self._queue.lines(time.monotonic())
        for line in lines:
            line["tier"] = tenants[line["tenant"]].tier_name
        return {
            "waiting": len(self._queue),
            "most": self._settings.max_queue,
            "predicted_wait_s": self._queue.predicted_wait_s(),
            "lines": lines,
        }

    def _tenants(self, query: bytes) -> Said:
        """Those that got most first."""
        limit = _limit(_asked(query, "limit"))
        tenants = self._doorkeeper.tenants
        now_s = time.monotonic()
        rows = [self._tenant(tenant, now_s) for tenant in tenants.values()]
        return {"tenants": _most_served(rows)[:limit], "known": len(rows)}

    def _tenant(self, tenant: Tenant, now_s: float) -> Said:
        account = tenant.account
        buckets = {"requests_per_min": account.requests, "tokens_per_min": account.tokens}
        told = {name: bucket.told(now_s) for name, bucket in buckets.items() if bucket is not None}
        return {
            "name": tenant.name,
            "tier": tenant.tier_name,
            "priority": tenant.tier.priority,
            "running": account.running,
            "waiting": self._queue.waiting_of(tenant.name),
            "served_tokens": self._queue.served_of(tenant.name),
            "parallel": account.limits.parallel or None,
            **{
                name: {"limit": limit, "remaining": left, "reset_s": round(owed_s, 3)}
                for name, (limit, left, owed_s) in told.items()
            },
        }

    def _newest(self, query: bytes) -> Said:
        asked = _asked(query, "limit", "silent")
        silent = asked.get("silent", "0")
        if silent not in ("0", "1"):
            raise InvalidRequest("silent: 0 or 1", param="silent")
        return {"decisions": self._decisions.newest(_limit(asked), silent=silent == "1")}

    def _linted(self, query: bytes) -> Said:
        limit = _limit(_asked(query, "limit"))
        if self._lint is None:
            raise NotFound("lint is off", code="route_not_found")
        said = self._lint.tell()
        return {**said, "tenants": said["tenants"][:limit]}

    def _predicted(self, query: bytes) -> Said:
        """Since the start."""
        _asked(query)
        states: dict[str, dict[str, int]] = {state: dict.fromkeys(OUTCOMES, 0) for state in STATES}
        for (state, outcome), number in self._metrics.predictions.values.items():
            states[state][outcome] = int(number)
        for (state,), number in self._metrics.misses.values.items():
            states[state]["silent_misses"] = int(number)
        kinds = ("prompt", "cached", "predicted_cached")
        tokens = {kind: int(self._metrics.tokens.values.get((kind,), 0)) for kind in kinds}
        return {"states": states, "tokens": tokens}


def _asked(query: bytes, *known: str) -> dict[str, str]:
    """The query's fields. Raises InvalidRequest for one that is not known."""
    asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    for name in asked:
        if name not in known:
            raise InvalidRequest(f"{name!r}: no such field of this query", param=name)
    return asked


def _limit(asked: dict[str, str]) -> int:
    text = asked.get("limit", str(ROWS))
    plain = text.isascii() and text.isdigit() and len(text) < 9  # int() takes other digits as well
    if not (plain and 1 <= int(text) <= MOST_ROWS):
        raise InvalidRequest(f"limit: 1 to {MOST_ROWS}", param="limit")
    return int(text)


def _most_served(rows: Sequence[Said]) -> list[Said]:
    return sorted(rows, key=lambda row: (-row["served_tokens"], row["name"]))


# ------------------------------------------------------------ several processes


def joined(target: bytes, said: Sequence[Said]) -> Said:
    """What several processes answer to one route, as one; `JOINED` has the routes."""
    path, _, query = target.partition(b"?")
    return JOINED[path.decode("latin-1")](said, query)


def _one_list_of_workers(said: Sequence[Said], query: bytes) -> Said:
    """What the first says; a worker that is not up for all of them is what it is for another."""
    whole = said[0]
    rows = {row["name"]: row for row in whole["workers"] if row["state"] == "up"}
    for other in (other for one in said[1:] for other in one["workers"]):
        row = rows.get(other["name"])
        if row is not None and other["state"] != "up":
            row["state"], row["why"] = other["state"], other["why"]
    return whole


def _one_queue(said: Sequence[Said], query: bytes) -> Said:
    lines: dict[tuple[Any, ...], Said] = {}
    for line in (line for one in said for line in one["lines"]):
        key = (line["model"], line["priority"], line["tenant"])
        if key in lines:
            line["waiting"] += lines[key]["waiting"]
            line["oldest_s"] = max(line["oldest_s"], lines[key]["oldest_s"])
        lines[key] = line
    return {
        "waiting": sum(one["waiting"] for one in said),
        "most": sum(one["most"] for one in said),
        "predicted_wait_s": max(one["predicted_wait_s"] for one in said),
        "lines": list(lines.values()),
    }


def _one_list_of_tenants(said: Sequence[Said], query: bytes) -> Said:
    rows: dict[str, Said] = {}
    for row in (row for one in said for row in one["tenants"]):
        other = rows.get(row["name"])
        if other is not None:
            for name in ("running", "waiting", "served_tokens"):
                row[name] += other[name]
            for name in ("requests_per_min", "tokens_per_min"):
                if name in row:  # whoever asked the limits' server last knows of the most
                    row[name] = min(row[name], other[name], key=lambda told: told["remaining"])
        rows[row["name"]] = row
    ordered = _most_served(list(rows.values()))
    limit = _limit(_asked(query, "limit"))
    return {"tenants": ordered[:limit], "known": max(one["known"] for one in said)}


def _one_list_of_decisions(said: Sequence[Said], query: bytes) -> Said:
    rows = [row for one in said for row in one["decisions"]]
    rows.sort(key=lambda row: -row["at_s"])
    return {"decisions": rows[: _limit(_asked(query, "limit", "silent"))]}


def _one_list_of_predictions(said: Sequence[Said], query: bytes) -> Said:
    whole = said[0]
    for one in said[1:]:
        for state, counts in one["states"].items():
            for outcome, number in counts.items():
                whole["states"][state][outcome] += number
        for kind, number in one["tokens"].items():
            whole["tokens"][kind] += number
    return whole


def _one_lint(said: Sequence[Said], query: bytes) -> Said:
    tenants: dict[str, Said] = {}
    for row in (row for one in said for row in one["tenants"]):
        other = tenants.setdefault(row["name"], row)
        if other is not row:
            for name in ("requests", "looked", "prompt_tokens", "lost_tokens"):
                other[name] += row[name]
            other["findings"] += row["findings"]
    for row in tenants.values():
        row["findings"] = _one_list_of_findings(row["findings"])
    ordered = sorted(tenants.values(), key=lambda row: (-row["lost_tokens"], row["name"]))
    return {
        "excerpts": said[0]["excerpts"],
        "used_bytes": sum(one["used_bytes"] for one in said),
        "tenants": ordered[: _limit(_asked(query, "limit"))],
    }


def _one_list_of_findings(found: Sequence[Said]) -> list[Said]:
    """Equal places added up; the newest is shown."""
    places: dict[tuple[Any, ...], Said] = {}
    for one in sorted(found, key=lambda one: one["last_s"]):
        key = (one["model"], one["place"], one["kind"])
        if (before := places.get(key)) is not None:
            one["seen"] += before["seen"]
            one["lost_tokens"] += before["lost_tokens"]
            one["first_s"] = min(one["first_s"], before["first_s"])
        places[key] = one
    return sorted(places.values(), key=lambda one: -one["lost_tokens"])


JOINED: dict[str, Callable[[Sequence[Said], bytes], Said]] = {
    "/gateway/workers": _one_list_of_workers,
    "/gateway/queue": _one_queue,
    "/gateway/tenants": _one_list_of_tenants,
    "/gateway/decisions": _one_list_of_decisions,
    "/gateway/lint": _one_lint,
    "/gateway/predictions": _one_list_of_predictions,
}

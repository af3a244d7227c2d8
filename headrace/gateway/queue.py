"""The central queue: a request waits here, not at a worker, until one has room.

Strict priority first (lower = more urgent), then the tenant that has had the least service:
uncached input + 2 * output tokens (a virtual token counter, arXiv 2401.00588). A tenant that comes
back is lifted to the least served of those that wait, so absence saves nothing up. Whoever has
waited `starve_s` is next, whatever its priority.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

OUTPUT_WEIGHT = 2
RATE_SHARE = 0.1  # of a new measurement in the time between two departures


class Waiting:
    """One request that waits. `go` is called when a worker may have room, `late` at its end."""

    __slots__ = ("deadline_s", "go", "late", "model", "priority", "since_s", "tenant")

    def __init__(
        self,
        tenant: str,
        model: str,
        priority: int,
        since_s: float,
        deadline_s: float,
        go: Callable[[], bool],
        late: Callable[[], None],
    ) -> None:
        """go: try to place it; False = still no room."""
        self.tenant, self.model, self.priority = tenant, model, priority
        self.since_s, self.deadline_s, self.go, self.late = since_s, deadline_s, go, late


class Queue:
    """Those that wait, by model, priority and tenant."""

    def __init__(self, most: int, starve_s: float) -> None:
        self._most, self._starve_s = most, starve_s
        self._models: dict[str, dict[int, dict[str, deque[Waiting]]]] = {}
        self._served: dict[str, float] = {}  # tenant -> weighted tokens; of those that wait
        self._waits: dict[str, int] = {}  # tenant -> how many of it wait
        self._length = 0
        self._left_s = 0.0  # when one left last
        self._gap_s = 0.0  # mean time between two that leave; 0 = not known

    def __len__(self) -> int:
        return self._length

    def predicted_wait_s(self) -> float:
        """Time until one that comes now has a worker; 0 = not known."""
        return self._gap_s * (self._length + 1)

    def waits_for(self, model: str) -> bool:
        """Whether somebody waits for it: who comes later goes behind."""
        return model in self._models

    @property
    def full(self) -> bool:
        """No more may wait."""
        return self._length >= self._most

    def add(self, item: Waiting) -> None:
        """It waits from now on."""
        assert not self.full, "asked before"
        if item.tenant not in self._waits:
            least = min((self._served.get(t, 0.0) for t in self._waits), default=0.0)
            self._served[item.tenant] = max(self._served.get(item.tenant, 0.0), least)
        self._line(item).append(item)
        self._count(item)

    def remove(self, item: Waiting) -> bool:
        """It waits no more; whether it did."""
        line = self._models.get(item.model, {}).get(item.priority, {}).get(item.tenant, deque())
        if item not in line:
            return False
        line.remove(item)
        self._tidy(item)
        return True

    def serve(self, tenant: str, input_tokens: int, output_tokens: int) -> None:
        """What a tenant got (or, where negative, did not get after all)."""
        got = input_tokens + OUTPUT_WEIGHT * output_tokens
        self._served[tenant] = self._served.get(tenant, 0.0) + got

    def served_of(self, tenant: str) -> float:
        """What a tenant got so far, in weighted tokens; one that waited may have been lifted."""
        return self._served.get(tenant, 0.0)

    def waiting_of(self, tenant: str) -> int:
        """How many of a tenant wait."""
        return self._waits.get(tenant, 0)

    def lines(self, now_s: float) -> list[dict[str, Any]]:
        """Who waits, a row for each line, the most urgent first."""
        return [
            {
                "model": model,
                "priority": priority,
                "tenant": tenant,
                "waiting": len(line),
                "oldest_s": round(now_s - line[0].since_s, 3),
            }
            for model, bands in self._models.items()
            for priority, band in sorted(bands.items())
            for tenant, line in band.items()
        ]

    def pump(self, now_s: float) -> None:
        """A worker may have room: let those go that find one, in order."""
        for model in sorted(self._models, key=self._oldest_s):  # one worker may be in several lines
            while (item := self._next(model, now_s)) is not None:
                self.remove(item)
                if not item.go():
                    self._put_back(item)
                    break
                self._departed(now_s)

    def expire(self, now_s: float) -> None:
        """End those whose time is over."""
        over = [item for item in self._all() if now_s >= item.deadline_s]
        for item in over:
            self.remove(item)
            item.late()

    # ------------------------------------------------------------ inside

    def _next(self, model: str, now_s: float) -> Waiting | None:
        bands = self._models.get(model)
        if not bands:
            return None
        heads = [line[0] for band in bands.values() for line in band.values()]
        oldest = min(heads, key=lambda item: item.since_s)
        if now_s - oldest.since_s >= self._starve_s:
            return oldest
        band = bands[min(bands)]
        return band[min(band, key=lambda tenant: self._served.get(tenant, 0.0))][0]

    def _oldest_s(self, model: str) -> float:
        """Since when the first of a line waits."""
        return min(
            line[0].since_s for band in self._models[model].values() for line in band.values()
        )

    def _put_back(self, item: Waiting) -> None:
        self._line(item).appendleft(item)
        self._count(item)

    def _line(self, item: Waiting) -> deque[Waiting]:
        bands = self._models.setdefault(item.model, {})
        return bands.setdefault(item.priority, {}).setdefault(item.tenant, deque())

    def _count(self, item: Waiting) -> None:
        self._length += 1
        self._waits[item.tenant] = self._waits.get(item.tenant, 0) + 1

    def _departed(self, now_s: float) -> None:
        if self._left_s:
            gap_s = now_s - self._left_s
            self._gap_s += RATE_SHARE * (gap_s - self._gap_s) if self._gap_s else gap_s
        self._left_s = now_s if self._length else 0.0

    def _tidy(self, item: Waiting) -> None:
        self._length -= 1
        self._waits[item.tenant] -= 1
        if not self._waits[item.tenant]:
            del self._waits[item.tenant]
        bands = self._models[item.model]
        if not bands[item.priority][item.tenant]:
            del bands[item.priority][item.tenant]
            if not bands[item.priority]:
                del bands[item.priority]
                if not bands:
                    del self._models[item.model]

    def _all(self) -> list[Waiting]:
        return [
            item
            for bands in self._models.values()
            for band in bands.values()
            for line in band.values()
            for item in line
        ]

"""The server's own /metrics while a level runs: what grew, and how high gauges stood."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from headrace.bench.load import Target, client_session
from headrace.bench.stats import ServerMetric

PREFIXES = (
    *("headrace_", "vllm:", "sglang:", "llamacpp:", "trtllm_", "tgi_", "process_"),
    *("nvidia_smi_", "DCGM_FI_"),  # a GPU's exporter behind the same page
)
PERIOD_S = 1.0


def parse(text: str) -> dict[str, tuple[str, float]]:
    """Name of series -> (counter or gauge, value summed over labels). Buckets are left out."""
    wanted = [
        line
        for line in text.splitlines()
        if line.removeprefix("# TYPE ").startswith(PREFIXES) and "_bucket" not in line
    ]
    found: dict[str, tuple[str, float]] = {}
    for family in text_string_to_metric_families("\n".join(wanted)):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            kind = "gauge" if family.type in ("gauge", "unknown") else "counter"
            found[sample.name] = (kind, found.get(sample.name, ("", 0.0))[1] + sample.value)
    return found


class Scraper:
    """`async with Scraper(target, on=True) as scraper:` reads at both ends and each second.

    A server without /metrics, or whose page cannot be read, leaves `summary` empty.
    """

    def __init__(self, target: Target, *, on: bool) -> None:
        self._target, self._on = target, on
        self._pages: list[tuple[float, dict[str, tuple[str, float]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Scraper:
        if self._on:
            self._session = client_session(self._target)
            await self._read()
            if self._pages:
                self._task = asyncio.create_task(self._each_second())
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._on:
            return
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await self._read()
        await self._session.close()

    async def _each_second(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._read()

    async def _read(self) -> None:
        url, headers = self._target.url + "/metrics", self._target.headers()
        timeout = aiohttp.ClientTimeout(total=10)
        try:
            async with self._session.get(url, headers=headers, timeout=timeout) as response:
                if response.status == 200:
                    now_s = asyncio.get_running_loop().time()
                    self._pages.append((now_s, parse(await response.text())))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return  # a page that is missing is one reading less

    def summary(self) -> dict[str, ServerMetric]:
        """Series that moved or stood above 0."""
        if len(self._pages) < 2:
            return {}
        (first_s, first), (last_s, last) = self._pages[0], self._pages[-1]
        found: dict[str, ServerMetric] = {}
        for name, (kind, value) in last.items():
            if kind == "gauge":
                values = [page[name][1] for _, page in self._pages if name in page]
                metric = ServerMetric(kind, sum(values) / len(values), max(values))
            else:
                grown = value - first.get(name, ("", 0.0))[1]
                metric = ServerMetric(kind, grown / max(last_s - first_s, 1e-9), grown)
            if metric.max:
                found[name] = metric
        return found

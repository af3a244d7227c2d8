"""Active checks: each worker is asked for its health, and now and then for its models; for how full
its KV cache is too, where the policy goes by it.

Busy is not dead: a failed check keeps new requests away, no more. Only a worker that answers no
check AND sends no byte of any answer for `hung_after_s` has its requests ended. A check whose time
passed while the gateway's own process stood still says nothing of the worker.
"""

from __future__ import annotations

import asyncio
import time

from headrace.errors import Loop
from headrace.foreign_json import Malformed, read_json
from headrace.gateway.fleet import Fleet
from headrace.gateway.kv_usage import read_kv_usage
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.upstream import fetch
from headrace.gateway.worker import Worker

MODELS_EVERY = 10  # checks
LATE_S = 0.5  # a limit that passes unseen for longer shows that this process stood still


class HeldUp(TimeoutError):
    """What the worker sent in time may not have been read."""


class Checks:
    """One task a worker, as long as the worker is in the fleet."""

    def __init__(self, fleet: Fleet, settings: GatewaySettings, mark: bytes) -> None:
        """mark: the gateway's name in `Via`."""
        self._fleet, self._settings, self._mark = fleet, settings, mark
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def sync(self) -> None:
        """Start watching workers that came, stop watching those that left."""
        here = set(self._fleet.workers.values())
        for worker in here - self._tasks.keys():
            self._tasks[worker] = asyncio.create_task(self._watch(worker))
        for worker in self._tasks.keys() - here:
            self._tasks.pop(worker).cancel()

    async def stop(self) -> None:
        """End all of them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    async def _watch(self, worker: Worker) -> None:
        good_s, count = time.monotonic(), 0
        while True:
            begun_s = time.monotonic()
            left_s = worker.hung_after_s - (begun_s - max(good_s, worker.pool.heard_s))
            timeout_s = self._settings.check_timeout_s
            if left_s > 0:
                timeout_s = min(timeout_s, max(0.1, left_s))  # so that hanging shows in time
            models = count % MODELS_EVERY == 0 or not worker.up
            try:
                why = await self._check(worker, models, timeout_s)
                hung = False
            except HeldUp:
                continue
            except OSError as error:  # TimeoutError is one
                timed_out = isinstance(error, TimeoutError)
                said = str(error) or type(error).__name__
                why = "no answer to a check" if timed_out else f"no connection: {said}"
                hung = timed_out
            if not hung:
                good_s = time.monotonic()
            if why:
                self._fleet.went_down(worker, why)
            else:
                self._fleet.came_up(worker)
                if self._settings.policy == "weighted":
                    worker.kv_usage = await self._kv_usage(worker)
            silent_s = time.monotonic() - max(good_s, worker.pool.heard_s)
            if hung and silent_s >= worker.hung_after_s:
                self._fleet.hangs(worker)
            count += 1
            passed_s = time.monotonic() - begun_s
            if not hung:  # one that gave no answer is asked again at once
                await asyncio.sleep(max(0.0, self._settings.check_interval_s - passed_s))

    async def _fetch(self, worker: Worker, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises OSError, TimeoutError or HeldUp."""
        limit_s = time.monotonic() + timeout_s
        try:
            return await fetch(worker.pool, request(worker, path, self._mark), timeout_s)
        except TimeoutError:
            if time.monotonic() - limit_s > LATE_S:
                raise HeldUp from None
            raise

    async def _check(self, worker: Worker, models: bool, timeout_s: float) -> str:
        """What is wrong with it; "" = nothing. Raises as `_fetch`."""
        path = worker.spec.health_path
        status, _ = await self._fetch(worker, path, timeout_s)
        if status == Loop.status:
            return "it is this gateway, or leads back to it"
        if status != 200:
            return f"{path} says {status}"
        if not models:
            return ""
        status, body = await self._fetch(worker, "/v1/models", timeout_s)
        if status != 200:
            return "" if worker.spec.models else f"/v1/models says {status}"
        worker.cards = _cards(body)
        worker.models = worker.spec.models or tuple(worker.cards)
        self._fleet.beliefs.follow(worker)
        return "" if worker.models else "/v1/models names no model"

    async def _kv_usage(self, worker: Worker) -> float | None:
        """As its metrics say; None: they do not, or not in time. It serves all the same."""
        try:
            limit_s = self._settings.check_timeout_s
            status, body = await self._fetch(worker, "/metrics", limit_s)
        except OSError:  # TimeoutError is one
            return None
        return read_kv_usage(body) if status == 200 else None


def request(worker: Worker, path: str, mark: bytes) -> bytes:
    """A GET of the gateway's own."""
    via = mark.decode()
    key = f"authorization: Bearer {worker.spec.api_key}\r\n" if worker.spec.api_key else ""
    head = f"GET {path} HTTP/1.1\r\nhost: {worker.host.decode()}\r\nvia: 1.1 {via}\r\n"
    return f"{head}{key}connection: close\r\n\r\n".encode()


def _cards(body: bytes) -> dict[str, object]:
    try:
        said = read_json(body, dict)
        return {card["id"]: card for card in said["data"] if isinstance(card["id"], str)}
    except (Malformed, KeyError, TypeError):
        return {}

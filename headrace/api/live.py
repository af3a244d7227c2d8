"""Live: the engine as it is now, asked for as long as somebody watches, and not otherwise."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from headrace.api.record_view import step_json
from headrace.engine.client import EngineClient
from headrace.errors import HeadraceError, NotReady
from headrace.messages import EngineInfo, View
from headrace.observe.metrics_page import Reading

PERIOD_S = 0.5
GPU = {  # what telemetry says of it each second: field -> metric
    "util": "headrace_device_utilization_ratio",
    "memory_used_bytes": "headrace_device_memory_used_bytes",
    "memory_bytes": "headrace_device_memory_bytes",
    "power_w": "headrace_device_power_watts",
    "temperature_c": "headrace_device_temperature_celsius",
    "bandwidth_ratio": "headrace_device_dram_active_ratio",
    "joules_per_token": "headrace_joules_per_token",
}
PATIENCE_S = 5.0  # with the engine, whose step may be a long one
LOST_S = 1.0  # a look that nothing came of for so long is sent again


class Live:
    """Asks the engine for views. One event loop.

    However many watch, the engine is asked for one view at a time, and an event is made once.
    """

    def __init__(self, client: EngineClient, reading: Callable[[str], Reading | None]) -> None:
        self._client, self._reading = client, reading
        client.on_view = self._heard
        self._waiting: list[tuple[bool, asyncio.Future[View]]] = []  # (wants states, who)
        self._asked_s: dict[bool, float] = {}  # (wants states) -> when the engine was asked last
        self._making = asyncio.Lock()
        self._event, self._made_s = b"", 0.0  # the newest
        self._before: View | None = None  # what it shows
        self._use = EngineUse()

    def _heard(self, view: View) -> None:
        waiting, self._waiting = self._waiting, []
        for states, future in waiting:
            if states and not view.states and view.kv_blocks:
                self._waiting.append((states, future))  # that was another's answer
            elif not future.done():
                future.set_result(view)

    async def view(self, *, states: bool = False) -> View:
        """The engine now. Raises NotReady, EngineDead."""
        self._client.require()
        future: asyncio.Future[View] = asyncio.get_running_loop().create_future()
        self._waiting.append((states, future))
        self._look(states)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await future
        except TimeoutError:
            raise NotReady("the engine does not answer") from None
        finally:
            self._waiting = [one for one in self._waiting if one[1] is not future]

    def _look(self, states: bool) -> None:
        """Ask for who came last, unless an answer for others is on its way."""
        now_s = time.monotonic()
        others = any(wants == states for wants, _ in self._waiting[:-1])
        if not others or now_s - self._asked_s[states] > LOST_S:
            self._asked_s[states] = now_s
            self._client.look(states=states)

    async def events(self, stopped: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Server-sent events, two a second, until `stopped`."""
        while not stopped():
            with suppress(HeadraceError):  # it loads, or is gone and may come back
                yield await self._newest()
            await asyncio.sleep(PERIOD_S)

    async def _newest(self) -> bytes:
        """An event that is younger than half a period, made for whoever wants it first."""
        async with self._making:
            age_s = time.monotonic() - self._made_s
            if self._event and age_s < PERIOD_S / 2:
                return self._event
            if age_s > PATIENCE_S:  # nobody watched: no rates over all that time
                self._before, self._use = None, EngineUse()
            view = await self.view()
            info = self._client.info
            device = self._use.read(self._client.engine_pid)
            if info is not None and info.device_uuid:
                device |= await asyncio.to_thread(gpu_now, self._reading)
            fleet = fleet_json(view, self._before, info, device)
            self._event = b"data: " + msgspec.json.encode(fleet) + b"\n\n"
            self._before, self._made_s = view, time.monotonic()
            return self._event


def fleet_json(
    view: View, before: View | None, info: EngineInfo | None, device: dict[str, Any]
) -> dict[str, Any]:
    """One event. Rates are those since `before`; null without one. Times of steps are
    milliseconds from now: negative."""
    passed_s = view.time_s - before.time_s if before is not None else 0.0

    def rate(name: str) -> float | None:
        if before is None or passed_s <= 0:
            return None
        done: int = getattr(view, name) - getattr(before, name)
        return round(done / passed_s, 3) if done >= 0 else None  # another engine counts anew

    return {
        "time_s": time.time(),
        "running": view.running,
        "waiting": view.waiting,
        "kv": {
            "blocks": view.kv_blocks,
            "used": view.kv_used,
            "cached": view.kv_cached,
            "block_size": view.block_size,
        },
        "tokens_per_s": rate("generation_tokens"),
        "prefill_tokens_per_s": rate("prefill_tokens"),
        "steps_per_s": rate("steps"),
        "ledger": [
            {"name": name, "bytes": size}
            for name, size in (info.ledger if info is not None else ())
        ],
        "device": device,
        "last_steps": [step_json(step, view.time_s) for step in view.last_steps],
    }


def gpu_now(reading: Callable[[str], Reading | None]) -> dict[str, Any]:
    """What is known of the GPU; fields that nothing is known of are left out."""
    found = {field: reading(name) for field, name in GPU.items()}
    known = {field: now.value for field, now in found.items() if now is not None}
    return {"name": "gpu", **{field: x for field, x in known.items() if x == x}}


class EngineUse:
    """Memory and processor time of the engine process, from /proc where there is one."""

    def __init__(self) -> None:
        self._read_s = self._used_s = 0.0

    def read(self, pid: int) -> dict[str, Any]:
        """rss_bytes, and cpu_cores: cores that it kept busy since the last call (null at first)."""
        with suppress(OSError, ValueError, IndexError):
            folder = Path("/proc") / str(pid)
            pages = int((folder / "statm").read_text().split()[1])
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            used_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            now_s = time.monotonic()
            passed_s = now_s - self._read_s if self._read_s else 0.0
            cores = (used_s - self._used_s) / passed_s if passed_s > 0 else None
            self._read_s, self._used_s = now_s, used_s
            return {
                "name": "cpu",
                "rss_bytes": pages * os.sysconf("SC_PAGESIZE"),
                "cpu_cores": cores,
            }
        return {"name": "cpu", "rss_bytes": None, "cpu_cores": None}

"""How fast a modelled worker is: the engine's own model of step time, measured or fitted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.engine.protocol import StepCost
from headrace.errors import ConfigError
from headrace.sim.workload import Workload


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's engine: step times, limits of a step, memory."""

    name: str
    cost: StepCost
    kv_tokens: int  # KV memory, in tokens
    max_step_tokens: int = 8192
    max_seqs: int = 512
    target_s: float = 0.0  # longest step beside decodes, as the engine's itl_target; 0 = no limit

    def prompts_s(self, workload: Workload) -> float:
        """Seconds that this device needs for all prompts if nothing is cached."""
        cost = self.cost
        return sum(
            cost.token_s * r.prompt_tokens + cost.pair_s * r.prompt_tokens**2 / 2
            for r in workload.requests
        )


# Fitted to benchmarks/results/gpu-h100-80gb-hbm3-2026-11-28-later.jsonl (tests fit it anew).
H100_14B = Device(
    name="h100-14b",
    cost=StepCost(
        floor_s=0.01024, token_s=4.535e-5, base_s=0.0, pair_s=1.052e-9, read_s=6.871e-8, tile=128
    ),
    kv_tokens=14022 * 16,
    target_s=0.05,
)
# A queue of prompts alone at 8000 tokens a second: how simple studies of routing model a worker.
PREFILL_ONLY = Device(
    name="prefill-only",
    cost=StepCost(floor_s=0.0, token_s=1 / 8000, base_s=0.0, pair_s=0.0, read_s=0.0, tile=1),
    kv_tokens=4000 * 512,
    max_step_tokens=512,
)
DEVICES: Mapping[str, Device] = {d.name: d for d in (H100_14B, PREFILL_ONLY)}

_WORK = re.compile(r"(prefill|wave|batch) (\d+)x\((\d+)->(\d+)\)")


def read_device(path: Path) -> Device:
    """A device from a file: JSON with the fields of `Device`, or JSON lines of
    `benchmarks/gpu/offline.py`, fitted. Raises ConfigError.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".jsonl":
            return fit(path.stem, [msgspec.json.decode(line) for line in data.splitlines()])
        return msgspec.json.decode(data, type=Device)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}", param="device") from None


def fit(name: str, rows: Sequence[Mapping[str, Any]]) -> Device:
    """The device behind measured rows {work: "prefill 1x(2048->1)" | "wave ..." | "batch ...",
    seconds} and one with kv_blocks.

    Prompts give the time of a token and of a pair (least squares), a wave of one the time in which
    weights are read, and batches, less their prompts, the time to read a context.
    Raises ConfigError where rows are missing.
    """
    works: list[tuple[str, int, int, int, float]] = []
    for row in rows:
        found = _WORK.match(str(row.get("work", "")))
        if found:
            n, tokens, out = map(int, found.groups()[1:])
            works.append((found[1], n, tokens, out, float(row["seconds"])))
    blocks = [int(row["kv_blocks"]) for row in rows if "kv_blocks" in row]
    prefills = [work for work in works if work[0] == "prefill"]
    ones = [work for work in works if work[0] == "wave" and work[1] == 1]
    batches = [work for work in works if work[0] == "batch" and work[2] > 1000]
    if len({work[2] for work in prefills}) < 2 or not (ones and batches and blocks):
        raise ConfigError(
            f"{name}: a fit needs prefills of two lengths, a wave of 1, a batch of prompts over "
            "1000 tokens, and kv_blocks",
            param="device",
        )
    sides = np.array([[n * t, n * t * t / 2] for _, n, t, _, _ in prefills], dtype=float)
    seconds = np.array([work[4] for work in prefills])
    scale = 1 / seconds  # each row's relative error counts alike
    (token_s, pair_s), *_ = np.linalg.lstsq(sides * scale[:, None], seconds * scale, rcond=None)
    floor_s = min(s / out for _, _, _, out, s in ones)
    reads = []
    for _, n, tokens, out, s in batches:
        prompts_s = n * (tokens * token_s + tokens**2 / 2 * pair_s)
        reads.append((s - prompts_s - out * floor_s) / (n * out * (tokens + out / 2)))
    cost = StepCost(
        floor_s=floor_s,
        token_s=float(token_s),
        base_s=0.0,
        pair_s=max(0.0, float(pair_s)),
        read_s=max(0.0, float(np.mean(reads))),
        tile=128,
    )
    return Device(name=name, cost=cost, kv_tokens=blocks[0] * 16, target_s=H100_14B.target_s)

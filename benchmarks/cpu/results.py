"""What was measured of each server on this processor: one JSON file that several runs fill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.stats import Level


class Run(msgspec.Struct, kw_only=True):
    """One server under the load. A figure that is not there was not measured: see `notes`."""

    name: str  # of the row: "llama-server Q4_0"
    version: str
    model: str  # file or folder
    bits: str  # what weights and activations are, in words
    settings: str  # flags and environment
    conditions: dict[str, str]  # processor, cores, date, ...
    levels: list[Level] = []
    prefill_tokens_per_s: float | None = None  # one prompt of `prefill_tokens` at a time, median
    prefill_tokens: int = 0
    ready_s: float | None = None  # from the start of the process to the first answer
    peak_mib: float | None = None  # largest sum of the process tree's proportional set sizes
    context_tokens: int = 0  # room of the KV cache
    notes: list[str] = []  # what failed or found no time left

    def level(self, concurrency: int) -> Level | None:
        """The level of so many requests at once, if it was measured and gave tokens."""
        good = [x for x in self.levels if x.concurrency == concurrency and x.output_tokens]
        return good[0] if good else None


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """One way to compute the model, against float32 on the dequantised weights."""

    name: str  # as `Run.name` where there is such a server
    perplexity: float
    agreement: float  # share of positions with the same first token
    divergence: float | None  # mean Kullback-Leibler, nats; None: it does not say enough
    tokens: int  # that were predicted
    text: str
    date: str


class Results(msgspec.Struct, kw_only=True):
    """Everything in one file, in the order in which it first came."""

    runs: list[Run] = []
    quality: list[Quality] = []

    def put(self, found: Run | Quality) -> None:
        """Add, or take the place of the one with the same name."""
        there: list[Any] = self.runs if isinstance(found, Run) else self.quality
        for at, old in enumerate(there):
            if old.name == found.name:
                there[at] = found
                return
        there.append(found)

    def quality_of(self, name: str) -> Quality | None:
        return next((x for x in self.quality if x.name == name), None)


def read(file: Path) -> Results:
    """Empty results if there is no file. Raises msgspec.ValidationError for another shape."""
    if not file.exists():
        return Results()
    return msgspec.json.decode(file.read_bytes(), type=Results)


def save(results: Results, file: Path) -> None:
    """Replace the file as a whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    os.replace(part, file)

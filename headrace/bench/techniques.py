"""The techniques that `headrace ablate` switches on one after another, as data.

Each is switched by settings of `headrace serve` and by nothing else: a row of the ablation is a
server whose settings have this technique and all before it on, and all after it off. Where a
backend cannot be without one, `never_off` says why, and the ablation names it instead of a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Changes = Mapping[str, Any]  # setting -> value


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What every row serves with: `sequences` at once, none longer than `max_model_len`; memory
    for `whole` sequences of that length."""

    sequences: int
    max_model_len: int
    whole: int
    block_size: int = 16

    def base(self) -> dict[str, Any]:
        """Settings that all rows share, as far as no technique changes them."""
        blocks = -(-self.max_model_len // self.block_size)
        return {
            "max_num_seqs": self.sequences,
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "kv_blocks": self.whole * blocks,
        }

    def unpaged(self) -> dict[str, Any]:
        """The same memory with a block as long as the longest sequence: each takes a whole one."""
        return {"block_size": self.max_model_len, "kv_blocks": self.whole}


class Technique(msgspec.Struct, frozen=True, kw_only=True):
    """`off` and `on`: settings, by backend; a backend in neither `off` nor `never_off` has no such
    thing, and no row."""

    name: str
    what: str
    off: Mapping[str, Changes] = {}
    on: Mapping[str, Changes] = {}
    never_off: Mapping[str, str] = {}
    unpaged: bool = False  # off: `Load.unpaged`


def _everywhere(**changes: Any) -> dict[str, Changes]:
    return dict.fromkeys(("fake", "cpu", "cuda"), changes)


NAIVE = "naive"
TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="static batches",
        what="the engine's own batches; the next begins when the last answer of one has ended",
        off={"cpu": {"engine": "naive"}},
        never_off={
            "fake": "transformers has no fake model to generate() with",
            "cuda": "the naive engine, transformers' generate(), runs on the processor alone",
        },
    ),
    Technique(
        name="native kernels",
        what="C++ over packed weights, where torch multiplied tensors",
        off={"cpu": {"cpu_kernels": "torch"}},
        on={"cpu": {"cpu_kernels": "native"}},
    ),
    Technique(
        name="int8 activations",
        what="products of integers with packed weights",
        off={"cpu": {"cpu_precision": "exact"}},
        on={"cpu": {"cpu_precision": "fast"}},
    ),
    Technique(
        name="fused kernels",
        what="norm, products, rotary embedding and KV write in five launches a layer",
        never_off={"cuda": "the backend has no path without them"},
    ),
    Technique(
        name="continuous batching",
        what="a request joins and leaves at any step",
        off=_everywhere(scheduling_policy="static"),
    ),
    Technique(
        name="paged KV cache",
        what="blocks of 16 tokens, where a sequence had a place as long as the longest one",
        off={"fake": {}, "cpu": {}},
        never_off={"cuda": "its kernels read small blocks; there are none for whole sequences"},
        unpaged=True,
    ),
    Technique(
        name="prefix reuse",
        what="KV of equal beginnings of prompts is computed once",
        off=_everywhere(prefix_caching=False),
    ),
    Technique(
        name="overlap",
        what="the next step is planned while one runs",
        off=_everywhere(overlap="off"),
        on=_everywhere(overlap="on"),
    ),
    Technique(
        name="CUDA graphs",
        what="a step is one launch, not one a kernel",
        off={"cuda": {"cuda_graphs": False}},
    ),
)


class Row(msgspec.Struct, frozen=True):
    """One server of an ablation; `number`: techniques that are on."""

    number: int
    name: str
    what: str
    settings: dict[str, Any]


class Fixed(msgspec.Struct, frozen=True):
    """A technique that cannot be switched off here, and why."""

    name: str
    why: str


def rows_of(
    backend: str, load: Load, techniques: Sequence[Technique] = TECHNIQUES
) -> tuple[list[Row], list[Fixed]]:
    """The rows in order, and what has none. The first row has every technique off that can be."""
    mine = [one for one in techniques if backend in one.off]
    fixed = [
        Fixed(one.name, one.never_off[backend]) for one in techniques if backend in one.never_off
    ]
    rows = []
    for count in range(len(mine) + 1):
        on, off = mine[:count], mine[count:]
        first = "nothing of it" if count == 0 else ""
        if any("engine" in one.off[backend] for one in off):  # it has no other settings
            settings: dict[str, Any] = {"engine": "naive", "max_model_len": load.max_model_len}
            rows.append(Row(count, NAIVE, "one transformers generate() at a time", settings))
            continue
        settings = load.base()
        for one in on:
            settings |= one.on.get(backend, {})
        for one in off:
            settings.update(one.off[backend])
            if one.unpaged:
                settings |= load.unpaged()
        name = first or mine[count - 1].name
        what = "all that follows is off" if first else mine[count - 1].what
        rows.append(Row(count, name, what, settings))
    return rows, fixed


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Flags of `headrace serve`."""
    found = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            found += [flag, str(value)]
    return found

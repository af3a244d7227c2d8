"""Which configuration streams a matrix fastest on a card: data that a script measured.

`tuned/<card>.json` is written by `scripts/tune_kernels` on that card:

    card, date, versions, dtype    what was measured, when, with which torch and triton
    entries    products: kind of layer (qkv, out, gate_up, down, head), n and k of its weight
               [n, k], bucket of tokens (`product.BUCKETS`), config (the fields of
               `product.Config`; null: the library's product and kernels of their own were faster)
    decode     attention of single tokens: heads, kv_heads, head_dim, bucket, splits of a sequence,
               config (the fields of `attention_configs.DecodeConfig`)
    tiles      gate and up of many tokens in one kernel: n and k of the weight, tokens (the least
               that it is for), config (the fields of `gate_up_tiles.TileConfig`; null: the
               library's product and the activation were faster)
    step       for people alone: milliseconds of steps ("tokens x context") of a model of so many
               layers: with the library, with what was chosen before and after

`decode`, `step` and the entries that a whole step chose are `scripts/tune_step`'s, `tiles` are
`benchmarks.kernels.tiles`'.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.kernels.attention_configs import DecodeConfig, decode_config
from headrace.kernels.attention_decode import choose_splits
from headrace.kernels.gate_up_tiles import TileConfig
from headrace.kernels.product import MAX_TOKENS, Config, block_m
from headrace.kernels.shapes import power_of_two

FOLDER = Path(__file__).parent / "tuned"
KINDS = ("qkv", "out", "gate_up", "down", "head")


@functools.cache  # asked for by every product of a step that is launched call by call
def card_file(device_name: str, folder: Path = FOLDER) -> Path:
    """ "NVIDIA H100 80GB HBM3" -> nvidia-h100-80gb-hbm3.json"""
    return folder / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


@functools.cache
def entries(path: Path) -> dict[tuple[str, int, int, int], Config | None]:
    """(kind, N, K, bucket) -> configuration; empty where nobody measured."""
    if not path.exists():
        return {}
    found = {}
    for entry in json.loads(path.read_text()).get("entries", []):
        config = None if entry["config"] is None else Config(**entry["config"])
        found[entry["kind"], entry["n"], entry["k"], entry["bucket"]] = config
    return found


def entry(kind: str, n: int, k: int, bucket: int, config: Config | None) -> dict[str, Any]:
    """As it stands in a card's file."""
    fields = None if config is None else dataclasses.asdict(config)
    return {"kind": kind, "n": n, "k": k, "bucket": bucket, "config": fields}


def default(m: int, n: int, k: int) -> Config:
    """For a shape that nobody measured: 64 rows a program, as most shapes that somebody did, and a
    matrix of few rows split until a card of 132 multiprocessors is full. Norms stay apart: as a
    kernel of their own they cost less than a microsecond, folded in more."""
    bucket, block_n, split = block_m(m), 64, 1
    while -(-n // block_n) * split < 128 and split < 8 and split * 512 <= k:
        split *= 2
    block_k, warps, stages = {
        16: (128, 8 if split > 1 else 4, 5 if split > 1 else 4),
        32: (128, 4, 4),
        64: (64, 4, 8 if split > 1 else 6),
    }.get(bucket, (64, 4, 4))
    return Config(
        block_n, block_k, warps, stages, split, prefetch_bytes=16384 if split > 1 else 32768,
        fold_norm=False, stagger=split > 1,
    )  # fmt: skip


def of_heads(m: int, n: int, k: int, head_dim: int) -> Config | None:
    """For q, k and v of m tokens whose heads have norms: a program takes the rows of a head, of as
    many columns as leave each multiprocessor one. None: no program takes heads of that size, or
    others are faster."""
    if head_dim not in (16, 32, 64, 128, 256) or m > 32:
        return None
    block_k = max(16, min(256, 8192 // head_dim, power_of_two(k)))
    split = 1
    while -(-n // head_dim) * split < 128 and block_k * split * 4 <= k:
        split *= 2
    return Config(head_dim, block_k, warps=4, stages=6, split_k=split, fold_norm=False)


def choose(
    kind: str,
    m: int,
    n: int,
    k: int,
    device_name: str,
    *,
    normed_head: int = 0,
    folder: Path = FOLDER,
) -> Config | None:
    """The configuration for m tokens and a weight [n, k]; None: the library's product.

    normed_head: of a model whose heads of q and k have norms, their size. Where the rows of a
    program of qkv are as many, norms and rotary embedding are part of the product.
    On a card that nobody measured it is the library's throughout: never much slower than the best.
    """
    assert kind in KINDS, f"{kind} is none of {KINDS}"
    measured = entries(card_file(device_name, folder))
    if m > MAX_TOKENS or not measured:
        return None
    unmeasured = default(m, n, k) if m <= 64 else None
    if kind == "qkv" and normed_head and unmeasured is not None:
        unmeasured = of_heads(m, n, k, normed_head) or unmeasured
    return measured.get((kind, n, k, block_m(m)), unmeasured)


@functools.cache
def tile_entries(path: Path) -> dict[tuple[int, int], list[tuple[int, TileConfig | None]]]:
    """(N, K) -> (least tokens, configuration), most tokens first; empty where nobody measured."""
    if not path.exists():
        return {}
    found: dict[tuple[int, int], list[tuple[int, TileConfig | None]]] = {}
    for entry in json.loads(path.read_text()).get("tiles", []):
        config = None if entry["config"] is None else TileConfig(**entry["config"])
        found.setdefault((entry["n"], entry["k"]), []).append((entry["tokens"], config))
    return {
        shape: sorted(of_shape, key=lambda one: one[0], reverse=True)
        for shape, of_shape in found.items()
    }


def tile_entry(n: int, k: int, tokens: int, config: TileConfig | None) -> dict[str, Any]:
    """As it stands in a card's file."""
    fields = None if config is None else dataclasses.asdict(config)
    return {"n": n, "k": k, "tokens": tokens, "config": fields}


def choose_tiles(
    tokens: int, n: int, k: int, device_name: str, *, folder: Path = FOLDER
) -> TileConfig | None:
    """For gate and up [n, k] of so many tokens; None: the library's product and the activation."""
    measured = tile_entries(card_file(device_name, folder)).get((n, k), [])
    return next((config for least, config in measured if tokens >= least), None)


class Heads(NamedTuple):
    """What the choice for attention depends on beside the tokens."""

    heads: int
    kv_heads: int
    head_dim: int


class Decoding(NamedTuple):
    """How single tokens attend: the kernel's configuration and its splits."""

    config: DecodeConfig
    splits: int


@functools.cache
def decode_entries(path: Path) -> dict[tuple[Heads, int], Decoding]:
    """(heads, bucket) -> what was measured in elements of 16 bits; empty where nobody did."""
    if not path.exists():
        return {}
    return {
        (Heads(*(found[name] for name in Heads._fields)), found["bucket"]): Decoding(
            DecodeConfig(**found["config"]), found["splits"]
        )
        for found in json.loads(path.read_text()).get("decode", [])
    }


def decode_entry(heads: Heads, bucket: int, chosen: Decoding) -> dict[str, Any]:
    """As it stands in a card's file."""
    config = dataclasses.asdict(chosen.config)
    return heads._asdict() | {"bucket": bucket, "splits": chosen.splits, "config": config}


def default_decoding(
    tokens: int, heads: Heads, dtype: torch.dtype, multiprocessors: int
) -> Decoding:
    """For heads, tokens or a card that nobody measured."""
    config = decode_config(dtype, heads.head_dim)
    return Decoding(config, choose_splits(heads.kv_heads, multiprocessors, tokens))


def choose_decoding(
    tokens: int,
    heads: Heads,
    dtype: torch.dtype,
    multiprocessors: int,
    device_name: str,
    *,
    folder: Path = FOLDER,
) -> Decoding:
    """For a step of `tokens` single tokens."""
    default = default_decoding(tokens, heads, dtype, multiprocessors)
    if tokens > MAX_TOKENS or dtype.itemsize != 2:
        return default
    return decode_entries(card_file(device_name, folder)).get((heads, block_m(tokens)), default)

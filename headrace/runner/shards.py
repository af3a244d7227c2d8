"""The files of a checkpoint of several parts, and which of them has which tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.errors import ModelError
from headrace.runner.named import fold

T = TypeVar("T")


def find(folder: Path, stem: str, suffix: str) -> tuple[list[Path], Mapping[str, str]]:
    """The files, and for each tensor in <stem><suffix>.index.json the name of its file.

    Without an index: <stem><suffix>, or all of <stem>-00001-of-0000N<suffix>. Raises ModelError for
    files that are missing and for an index that is none.
    """
    single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
    if index.exists():
        indexed = _read(index)
        names = set(indexed.values())
    elif single.exists():
        return [single], {}
    else:
        indexed, names = {}, _numbered(folder, stem, suffix)
        if not names:
            raise ModelError(f"{folder} holds no {single.name} and no index of shards")
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}")
    return [folder / name for name in sorted(names)], indexed


def _read(index: Path) -> Mapping[str, str]:
    try:
        written = msgspec.json.decode(index.read_bytes())["weight_map"]
        indexed = msgspec.convert(written, dict[str, str])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise ModelError(f"{index} is not an index of shards: {error!r}") from None
    outside = sorted({name for name in indexed.values() if Path(name).name != name})
    if outside:
        raise ModelError(f"{index} names files outside its folder: {', '.join(outside)}")
    return indexed


def _numbered(folder: Path, stem: str, suffix: str) -> set[str]:
    """Names of all parts, should one be there."""
    pattern = re.compile(rf"{re.escape(stem)}-(\d+)-of-(\d+){re.escape(suffix)}")
    found = [match for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    totals = {match[2] for match in found}
    if len(totals) > 1:
        raise ModelError(f"{folder} holds parts of several checkpoints: of {', '.join(totals)}")
    return {
        f"{stem}-{part:0{len(match[1])}}-of-{match[2]}{suffix}"
        for match in found[:1]
        for part in range(1, int(match[2]) + 1)
    }


def keep(
    path: Path, held: Mapping[str, T], found: dict[str, T], indexed: Mapping[str, str]
) -> None:
    """Add to `found` the tensors that `path` holds, less those that the index gives another file.

    Raises ModelError if two files hold a tensor and no index says which counts.
    """
    mine = {n: one for n, one in held.items() if indexed.get(n, path.name) == path.name}
    if twice := sorted(mine.keys() & found.keys()):
        raise ModelError(f"{path} holds tensors that another file holds too: {fold(twice)}")
    found.update(mine)


def refuse_lost(found: Mapping[str, object], indexed: Mapping[str, str]) -> None:
    """Raise ModelError if the index names tensors that their files do not hold."""
    if lost := indexed.keys() - found.keys():
        where = ", ".join(sorted({indexed[name] for name in lost}))
        raise ModelError(f"{where} lacks tensors that the index places there: {fold(lost)}")

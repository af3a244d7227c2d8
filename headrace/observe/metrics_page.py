"""The page /metrics of several processes: their mapped files, added up and written as text.

prometheus_client's processes write values into files of one folder: a header with the bytes in use,
then entries of a JSON key (family, sample, labels, help) and two doubles, value and time. Entries
are only ever appended, and a key never moves. So a key is parsed once, and a page is made of the
texts of the page before, but for series whose value changed.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from operator import add, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from headrace.observe.aliases import BY_SOURCE

_CHUNK = 256  # slots that are compared at once
_INTEGER = struct.Struct("i")
_COMBINE: Mapping[str, Callable[[Iterable[float]], float]] = {"sum": sum, "min": min, "max": max}

Labels = tuple[tuple[str, str], ...]  # sorted by name


class Reading(NamedTuple):
    """What a family says now, all its series added up.

    value: of counters and gauges; of a histogram its count. bounds, counts: of a histogram,
    observations in each bucket (not cumulative), the last bound is infinite. sum: of what it saw.
    """

    kind: str
    value: float
    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    sum: float = 0.0


class _Chunk:
    """Slots of one file that are read, and compared with what they were, as one.

    Neighbouring counters or gauges; or all of one process for one histogram, its sum the last.
    """

    def __init__(self, file: _File, bounds: list[float] | None = None) -> None:
        self.file = file
        self.bounds = bounds  # of a histogram, as far as they came; sorted, as its buckets are made
        self.indices: list[int] = []  # of doubles in the file
        self.series: list[_Series] = []  # of each slot; of a histogram, its own alone
        self.values: tuple[float, ...] = ()

    def add(self, index: int, series: _Series, bound: float | None = None) -> None:
        """One slot more."""
        self._pick = None
        if self.bounds is None:
            self.indices.append(index)
            self.series.append(series)
            return
        self.series = [series]
        at = len(self.bounds)
        if bound is not None:
            at = bisect_left(self.bounds, bound)
            self.bounds.insert(at, bound)
        self.indices.insert(at, index)

    def read(self, dirty: set[_Series]) -> None:
        """Take the values of now; name the series whose value changed."""
        if self._pick is None:
            dirty.update(self.series)
            # One index more: of a single one, itemgetter would make no tuple.
            self._pick = itemgetter(*self.indices, 0)
        now = self._pick(self.file.doubles)[:-1]
        if now == self.values:
            return
        if self.bounds is None:
            pairs = zip(now, self.values, self.series, strict=False)
            dirty.update([series for new, old, series in pairs if new != old])
        else:
            dirty.update(self.series)
        self.values = now

    def stamp(self, at: int) -> float:
        """When the value was set; 0 = never."""
        return self.file.doubles[self.indices[at] + 1]

    _pick: Callable[[Any], tuple[float, ...]] | None = None


class _File:
    """One mapped file, as far as it was parsed."""

    def __init__(self, path: Path, inode: int) -> None:
        self.path, self.inode = path, inode
        self.kind, _, rest = path.stem.partition("_")
        self.mode, _, self.pid = rest.rpartition("_")  # the mode: of gauges
        self.chunks: list[_Chunk] = []
        self.histograms: dict[_Series, _Chunk] = {}
        self._parsed = 8  # bytes, the header among them
        self._open()

    def _open(self) -> None:
        with self.path.open("rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self.doubles = memoryview(self._map).cast("d")

    def new_keys(self) -> Iterable[tuple[str, int]]:
        """Keys that were added since the last call, and the index of the double behind each."""
        (used,) = _INTEGER.unpack_from(self._map, 0)
        if used > len(self._map):
            self._open()
        while self._parsed < used:
            (size,) = _INTEGER.unpack_from(self._map, self._parsed)
            begin = self._parsed + 4
            at = begin + size + (8 - (size + 4) % 8)
            self._parsed = at + 16
            yield self._map[begin : begin + size].decode(), at // 8

    def chunk(self, series: _Series) -> _Chunk:
        """Where the next slot of `series` goes."""
        if self.kind == "histogram":
            if series not in self.histograms:
                self.histograms[series] = _Chunk(self, [])
                self.chunks.append(self.histograms[series])
            return self.histograms[series]
        if not self.chunks or len(self.chunks[-1].indices) == _CHUNK:
            self.chunks.append(_Chunk(self))
        return self.chunks[-1]


class _Series:
    """One line, or all lines of a histogram with one set of labels; under each of its names."""

    def __init__(self, family: _Family, labels: Labels, mode: str) -> None:
        self.family, self.mode = family, mode
        self.slots: list[tuple[_Chunk, int]] = []  # one a process
        self.parts: list[_Chunk] = []  # of a histogram: one a process
        self.texts: list[str] = []  # by name of the family
        self._bounds: list[float] = []
        self._heads: list[list[str]] = []  # by name: what stands before each value
        self._labels: list[str | None] = [_written(labels)]
        for alias in family.aliases:
            shown = alias.labels(dict(labels))
            self._labels.append(None if shown is None else _written(sorted(shown.items())))

    def value(self) -> float:
        """Of all processes."""
        values = [chunk.values[at] for chunk, at in self.slots]
        if len(values) == 1:
            return values[0]
        if self.mode == "mostrecent":
            return max(zip([c.stamp(at) for c, at in self.slots], values, strict=True))[1]
        return _COMBINE[self.mode](values)

    def counts(self) -> tuple[float, ...]:
        """Of a histogram: observations in each bucket, by rising bound, then their sum."""
        if len(self.parts) == 1:
            return self.parts[0].values
        return tuple(map(sum, zip(*(part.values for part in self.parts), strict=True)))

    @property
    def bounds(self) -> list[float] | None:
        """Of a histogram; None: it is not whole in every process yet.

        Its slots are made one after another, the infinite bound last.
        """
        bounds = self.parts[0].bounds or []
        if bounds[-1:] == [math.inf] and all(part.bounds == bounds for part in self.parts):
            return bounds
        return None

    def write(self) -> None:
        """Its text anew."""
        if self.family.kind == "histogram":
            self._write_histogram()
            return
        value, samples = _text(self.value()), self.family.samples
        self.texts = [
            "" if value == "NaN" or labels is None else f"{name}{labels} {value}\n"
            for name, labels in zip(samples, self._labels, strict=True)
        ]

    def _write_histogram(self) -> None:
        bounds = self.bounds
        if bounds is None:
            self.texts = [""] * len(self._labels)
            return
        if bounds != self._bounds:
            self._bounds = list(bounds)
            self._heads = list(map(self._heads_of, self.family.samples, self._labels))
        *counts, total = self.counts()
        texts = list(map(repr, accumulate(counts)))
        texts += (texts[-1], _text(total))
        self.texts = ["".join(map(add, heads, texts)) + "\n" * bool(heads) for heads in self._heads]

    def _heads_of(self, name: str, labels: str | None) -> list[str]:
        """Each begins with the end of the line before."""
        if labels is None:
            return []
        inner = labels[1:-1] + "," if labels else ""
        heads = [f'\n{name}_bucket{{{inner}le="{_text(bound)}"}} ' for bound in self._bounds]
        heads[0] = heads[0][1:]
        return [*heads, f"\n{name}_count{labels} ", f"\n{name}_sum{labels} "]


class _Family:
    """All series of a name, and of the aliases of that name."""

    def __init__(self, name: str, kind: str, text: str) -> None:
        self.name, self.kind = name, kind
        self.aliases = BY_SOURCE.get(name, ())
        self.names = [name, *(alias.name for alias in self.aliases)]
        suffix = "_total" if kind == "counter" else ""
        self.samples = [shown + suffix for shown in self.names]
        text = text.replace("\\", r"\\").replace("\n", r"\n")
        self._heads = [f"# HELP {x} {text}\n# TYPE {x} {kind}\n" for x in self.samples]
        self.series: dict[Labels, _Series] = {}
        self.text = ""

    def write(self) -> None:
        """Its text anew, from that of its series."""
        parts = []
        for at, head in enumerate(self._heads):
            lines = "".join([series.texts[at] for series in self.series.values()])
            parts += [head, lines] if lines else []
        self.text = "".join(parts)


class Page:
    """The page of the processes that write into `folder`. Any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._families: dict[str, _Family] = {}

    def text(self) -> bytes:
        """The page in Prometheus' text format."""
        with self._lock:
            self._read()
            return "".join([family.text for family in self._families.values()]).encode()

    def reading(self, name: str) -> Reading | None:
        """What the family says now; None: there is none. name: without `_total` and the like."""
        with self._lock:
            self._read()
            family = self._families.get(name)
            if family is None:
                return None
            every = list(family.series.values())
            if family.kind != "histogram":
                return Reading(family.kind, sum(series.value() for series in every))
            every = [series for series in every if series.bounds is not None]
            if not every:
                return None
            *counts, total = map(sum, zip(*(series.counts() for series in every), strict=True))
            bounds = tuple(every[0].bounds or ())
            return Reading(family.kind, sum(counts), bounds, tuple(counts), total)

    def _read(self) -> None:
        dirty: set[_Series] = set()
        self._find()
        for file in self._files.values():
            for key, index in file.new_keys():
                self._place(file, key, index)
            for chunk in file.chunks:
                chunk.read(dirty)
        for series in dirty:
            series.write()
        for family in {series.family for series in dirty}:
            family.write()

    def _find(self) -> None:
        """New files; a file that is gone, or another under its name, takes all with it."""
        with os.scandir(self._folder) as entries:
            found = {entry.name: entry.inode() for entry in entries if entry.name.endswith(".db")}
        known = {name: file.inode for name, file in self._files.items()}
        if found == known:
            return
        if any(found.get(name) != inode for name, inode in known.items()):
            self._files, self._families = {}, {}
        for name in sorted(found.keys() - self._files.keys()):
            path = self._folder / name
            try:
                if path.stat().st_size:
                    self._files[name] = _File(path, found[name])
            except FileNotFoundError:  # of a process that was forgotten just now
                continue

    def _place(self, file: _File, key: str, index: int) -> None:
        """Make the slot a part of its series."""
        name, _, labels, text = json.loads(key)
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = _Family(name, file.kind, text)
        mode = file.mode.removeprefix("live") if file.kind == "gauge" else "sum"
        bound = labels.pop("le", None) if file.kind == "histogram" else None
        if mode == "all":
            labels["pid"], mode = file.pid, "sum"
        ordered = tuple(sorted(labels.items()))
        series = family.series.get(ordered)
        if series is None:
            series = family.series[ordered] = _Series(family, ordered, mode)
        chunk = file.chunk(series)
        chunk.add(index, series, None if bound is None else float(bound))
        if file.kind != "histogram":
            series.slots.append((chunk, len(chunk.indices) - 1))
        elif chunk not in series.parts:
            series.parts.append(chunk)


def _text(value: float) -> str:
    if value - value == 0.0:  # finite
        return repr(value)
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"


def _written(labels: Iterable[tuple[str, str]]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

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
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

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

    Neighbouring counters or gauges; or all of one process for one histogram.
    """

    def __init__(self, file: _File) -> None:
        self.file = file
        self.offsets: list[int] = []  # of the doubles, in bytes, rising
        self.bounds: list[float] = []  # of a histogram, by slot; of its sum NaN
        self.series: list[_Series] = []  # by slot
        self.values: tuple[float, ...] = ()
        self.stamps: tuple[float, ...] = ()  # of gauges: when each was set, 0 = never
        self._old_stamps: tuple[float, ...] = ()
        self._reader: struct.Struct | None = None

    def add(self, offset: int, series: _Series, bound: float) -> None:
        """One slot more."""
        self.offsets.append(offset)
        self.series.append(series)
        self.bounds.append(bound)
        self._reader = None

    def read(self, dirty: set[_Series]) -> None:
        """Take the values of now; name the series whose value changed."""
        if self._reader is None:
            dirty.update(self.series)
            gaps = zip(self.offsets[1:], self.offsets, strict=False)
            entry = "dd" if self.file.kind == "gauge" else "d8x"  # a value and its time
            pads = "".join([f"{after - before - 16}x{entry}" for after, before in gaps])
            self._reader = struct.Struct(f"={entry}{pads}")
        now = self._reader.unpack_from(self.file.map, self.offsets[0])
        if self.file.kind == "gauge":  # the newest counts: its time is a part of its value
            self.stamps, now = now[1::2], now[::2]
            dirty.update([self.series[i] for i in self._restamped()])
        if now != self.values:
            if self.file.kind == "histogram":
                dirty.add(self.series[0])
            else:
                pairs = zip(now, self.values, self.series, strict=False)
                dirty.update([series for new, old, series in pairs if new != old])
            self.values = now

    def _restamped(self) -> list[int]:
        """Slots that were set since the last call, be it to the same value."""
        old, self._old_stamps = self._old_stamps, self.stamps
        pairs = enumerate(zip(self.stamps, old, strict=False))
        return [i for i, (new, before) in pairs if new != before]


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
            self.map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)

    def new_keys(self) -> Iterable[tuple[str, int]]:
        """Keys that were added since the last call, and where the double behind each begins."""
        (used,) = _INTEGER.unpack_from(self.map, 0)
        if used > len(self.map):
            self._open()
        while self._parsed < used:
            (size,) = _INTEGER.unpack_from(self.map, self._parsed)
            begin = self._parsed + 4
            at = begin + size + (8 - (size + 4) % 8)
            self._parsed = at + 16
            yield self.map[begin : begin + size].decode(), at

    def chunk(self, series: _Series) -> _Chunk:
        """Where the next slot of `series` goes."""
        if self.kind == "histogram":
            if series not in self.histograms:
                self.histograms[series] = _Chunk(self)
                self.chunks.append(self.histograms[series])
            return self.histograms[series]
        if not self.chunks or len(self.chunks[-1].offsets) == _CHUNK:
            self.chunks.append(_Chunk(self))
        return self.chunks[-1]


class _Series:
    """One line, or all lines of a histogram with one set of labels; under each of its names."""

    def __init__(self, family: _Family, labels: Labels, mode: str) -> None:
        self.family, self.mode = family, mode
        self.slots: list[tuple[_Chunk, int]] = []  # one a process
        self.parts: list[_Chunk] = []  # of a histogram: one a process
        self.texts: list[str] = []  # by name of the family
        self._shape: list[float] = []  # of a histogram: `_Chunk.bounds` that is prepared for
        self._pick: Callable[[tuple[float, ...]], tuple[float, ...]] = tuple  # to rising bounds
        self._templates: list[str] = []  # by name: its lines, with places for values
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
            stamps = [chunk.stamps[at] for chunk, at in self.slots]
            return max(zip(stamps, values, strict=True))[1]
        return _COMBINE[self.mode](values)

    def counts(self) -> tuple[float, ...]:
        """Of a whole histogram: observations in each bucket, by rising bound, then their sum."""
        if self.parts[0].bounds != self._shape:
            self._prepare()
        if len(self.parts) == 1:
            return self._pick(self.parts[0].values)
        columns = zip(*[part.values for part in self.parts], strict=True)
        return self._pick(tuple(map(sum, columns)))

    @property
    def whole(self) -> bool:
        """Of a histogram: every process has all of its slots, made one after another, the infinite
        bound last."""
        bounds = self.parts[0].bounds
        return bounds[-1] == math.inf and all(part.bounds[1:] == bounds[1:] for part in self.parts)

    @property
    def bounds(self) -> list[float]:
        """Of a whole histogram, rising."""
        return sorted(self.parts[0].bounds[1:])

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
        if not self.whole:
            self.texts = [""] * len(self._labels)
            return
        *counts, total = self.counts()
        sums = list(accumulate(counts))
        shown = (*sums, sums[-1], _text(total))
        self.texts = [template and template % shown for template in self._templates]

    def _prepare(self) -> None:
        """For the slots that there are now: the sum, then a bucket each."""
        self._shape = list(self.parts[0].bounds)
        slots = range(1, len(self._shape))
        self._pick = itemgetter(*sorted(slots, key=self._shape.__getitem__), 0)
        self._templates = list(map(self._template, self.family.samples, self._labels))

    def _template(self, name: str, labels: str | None) -> str:
        if labels is None:
            return ""
        name, labels = name.replace("%", "%%"), labels.replace("%", "%%")
        inner = labels[1:-1] + "," if labels else ""
        lines = [f'{name}_bucket{{{inner}le="{_text(bound)}"}} %d\n' for bound in self.bounds]
        return "".join([*lines, f"{name}_count{labels} %d\n", f"{name}_sum{labels} %s\n"])


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
            every = [series for series in every if series.whole]
            if not every:
                return None
            *counts, total = map(sum, zip(*(series.counts() for series in every), strict=True))
            bounds = tuple(every[0].bounds)
            return Reading(family.kind, sum(counts), bounds, tuple(counts), total)

    def _read(self) -> None:
        dirty: set[_Series] = set()
        self._find()
        for file in self._files.values():
            for key, offset in file.new_keys():
                self._place(file, key, offset)
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
        # Gauges are written last and read first: what is seen to be over is seen to be counted.
        order = sorted(self._files.items(), key=lambda item: item[1].kind != "gauge")
        self._files = dict(order)

    def _place(self, file: _File, key: str, offset: int) -> None:
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
        chunk.add(offset, series, math.nan if bound is None else float(bound))
        if file.kind != "histogram":
            series.slots.append((chunk, len(chunk.offsets) - 1))
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

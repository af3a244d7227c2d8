"""Where two prompts part, what both still have behind that place, and why they part.

A prompt is looked at as its request wrote it: JSON, cut into segments at places that depend on what
stands there (objects, lines, sentences; of token ids, those that end in 7). So a segment is found
again wherever it moved to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.foreign_json import Malformed, read_json

Kind = Literal["time", "id", "order", "added", "dropped", "text"]

_END = b"\0"  # JSON has none
_ENDS = bytes(0 if byte in b"{}.!?" else byte for byte in range(256))
_LINE = b"\\n"  # a line's end as JSON writes it; two ends, so that no length changes
_IDS = re.compile(rb"\[[\s\[]{0,8}\d")  # as a prompt of token ids begins, or several of them
_MARKED = (b"7, ", b"7,")  # one id in ten, with what stands between two
MAX_SEGMENTS = 4096  # the last one has the rest
MIN_SEGMENT_BYTES = 8  # shorter ones are found anywhere
LONG_BYTES, END_BYTES = 512, 64
MAX_TOKEN_BYTES = 64  # of a word that is looked at for a time or an id
_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?"
_TIME = re.compile(
    rb"\d{4}-\d{2}-\d{2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?"
    rb"|\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?"
    rb"|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}"
    rb"|" + _MONTH + rb" \d{1,2}\b|\b\d{1,2}\.? " + _MONTH +
    rb"|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
    rb"|\b1[5-9]\d{8}(?:\d{3}|\d{6})?\b"
)  # fmt: skip
_WORD = re.compile(rb"[\w-]+")
_ID = re.compile(rb"\d{4,}|(?=[\w-]*\d)[\w-]{8,}")
_AROUND_BYTES = 24


class Cut(msgspec.Struct, frozen=True):
    """A prompt's beginning, in segments."""

    segments: list[bytes]
    all: frozenset[bytes]  # segments, and ends of long ones
    size_bytes: int
    ids: bool = False  # they are token ids, which say nothing of a text

    @property
    def memory_bytes(self) -> int:
        """At most; tests measure it."""
        return 512 + self.size_bytes + 160 * len(self.segments)


class Divergence(msgspec.Struct, frozen=True):
    """Of a prompt from another."""

    at: int  # bytes that both begin with
    behind_bytes: int  # that both have, behind what differs
    kind: Kind
    excerpt: bytes  # what stands there, with a little before it
    other: bytes  # and in the other prompt


def cut(text: bytes) -> Cut:
    """The segments of a text."""
    ids = _IDS.match(text) is not None
    if ids:
        marked = text.replace(b"[", _END)
        for end in _MARKED:
            marked = marked.replace(end, end[:1] + _END * (len(end) - 1))
    else:
        marked = text.translate(_ENDS).replace(_LINE, 2 * _END)
    segments = marked.split(_END, MAX_SEGMENTS - 1)
    ends = [end for segment in segments if len(segment) >= LONG_BYTES for end in ends_of(segment)]
    return Cut(segments, frozenset([*segments, *ends]), len(text), ids)


def ends_of(segment: bytes) -> list[bytes]:
    """By which a long segment is also known: what stands in front of them may differ."""
    return [segment[-2 * END_BYTES : -END_BYTES], segment[-END_BYTES:]]


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading items two sequences of the same type share."""
    most = min(len(one), len(other))
    low, high = 0, min(64, most)
    while one[low:high] == other[low:high]:
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1:  # shared below low, not all shared below high
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def diverge(new: Cut, old: Cut, shared: int) -> Divergence | None:
    """How `new` parts from `old`, with which it shares so many leading segments; None: it goes on
    where `old` ends, or ends where `old` goes on."""
    if shared >= len(new.segments) or shared >= len(old.segments):
        return None
    own, others = new.segments[shared], old.segments[shared]
    inside = common(own, others)
    before = sum(map(len, new.segments[:shared])) + shared
    after = new.segments[shared + 1 :]
    behind = old.all.intersection(after).difference(new.segments[:shared])  # wherever they moved
    run = after[: common(after, old.segments[shared + 1 :])]  # or just where they were
    behind_bytes = max(
        sum(len(s) + 1 for s in behind if len(s) >= MIN_SEGMENT_BYTES),
        sum(map(len, run)) + len(run),
    )
    moved, left = _holds(old, own, inside), _holds(new, others, inside)
    if moved:
        behind_bytes += len(own) - inside
    elif not left:  # the same segment, with a change inside
        behind_bytes += common(own[inside:][::-1], others[inside:][::-1])
    return Divergence(
        at=before + inside,
        behind_bytes=behind_bytes,
        kind=_moved_kind(moved=moved, left=left)
        or ("text" if new.ids or old.ids else _changed_kind(own, others, inside)),
        excerpt=_around(own, inside),
        other=_around(others, inside),
    )


def _holds(prompt: Cut, segment: bytes, at: int) -> bool:
    """Whether a prompt has a segment somewhere, or what of it stands in the string around `at`."""
    inside = segment[segment.rfind(b'"', 0, at) + 1 :]
    return any(len(s) >= MIN_SEGMENT_BYTES and s in prompt.all for s in (segment, inside))


def _moved_kind(*, moved: bool, left: bool) -> Kind | None:
    """Of segments that one or both prompts have elsewhere; None: neither has."""
    if moved and left:
        return "order"
    if moved:
        return "dropped"  # what the old one had here is gone
    return "added" if left else None


def _changed_kind(own: bytes, others: bytes, inside: int) -> Kind:
    """Of a segment that changed inside."""
    if _hit(_TIME, own, inside) and _hit(_TIME, others, inside):
        return "time"
    if _is_id(own, inside) and _is_id(others, inside):
        return "id"
    return "text"


def _hit(pattern: re.Pattern[bytes], text: bytes, at: int) -> bool:
    """Whether a match of it touches the place."""
    start = max(0, at - MAX_TOKEN_BYTES)
    window = text[start : at + MAX_TOKEN_BYTES]
    return any(match.start() <= at - start <= match.end() for match in pattern.finditer(window))


def _is_id(text: bytes, at: int) -> bool:
    start = max(0, at - MAX_TOKEN_BYTES)
    for word in _WORD.finditer(text[start : at + MAX_TOKEN_BYTES]):
        if word.start() <= at - start <= word.end():
            return _ID.fullmatch(word[0]) is not None
    return False


def _around(text: bytes, at: int) -> bytes:
    return text[max(0, at - _AROUND_BYTES) : at + 2 * _AROUND_BYTES]


# ------------------------------------------------------------ where that is, for people

_TOKEN = re.compile(rb'"((?:[^"\\]+|\\.)*)("|\\?$)|[\[\]{},]', re.DOTALL)
_HALF = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")  # an escape that is cut
# Keys that protocols have; others are a tenant's own words and not told.
_TOLD = frozenset(
    b"arguments content description function id input input_schema instructions messages name "
    b"output parameters prompt properties reasoning_content required role source system text "
    b"tool_call_id tool_calls tools type".split()
)
MAX_DEPTH = 8


def place_of(raw: bytes, at: int) -> tuple[str, int]:
    """The path to a place in a JSON value, as `[0].content`, and the characters before it in its
    string (0: it is in none). A key that no protocol has is `*`.
    """
    path: list[int | bytes | None] = []  # of lists the index, of objects the key (None: none yet)
    characters = 0
    for token in _TOKEN.finditer(raw, 0, at):
        mark, characters = token[0][:1], 0
        if mark == b'"':
            if path and path[-1] is None:
                path[-1] = token[1]
            elif token[2] != b'"':  # the place is inside of this string
                characters = _characters(token[1])
        elif mark in b"[{":
            path.append(0 if mark == b"[" else None)
        elif mark in b"]}":
            if path:
                path.pop()
        elif path and isinstance(path[-1], int):
            path[-1] += 1
        elif path:
            path[-1] = None
    return "".join(map(_step, path[:MAX_DEPTH])), characters


def _step(step: int | bytes | None) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return "" if step is None else f".{step.decode()}" if step in _TOLD else ".*"


def _characters(string: bytes) -> int:
    """Of a string's beginning, as it is written in JSON."""
    text = _HALF.sub("", string.decode(errors="ignore"))
    try:
        decoded = read_json(f'"{text}"', str)
    except Malformed:
        return len(text)  # half of a pair of escapes
    return len(decoded)

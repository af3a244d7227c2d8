"""The W3C's trace context: the headers `traceparent` and `tracestate` (w3.org/TR/trace-context).

Here without OpenTelemetry: a server that exports nothing still logs the id that a caller gave.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

PARENT, STATE = b"traceparent", b"tracestate"
MOST_STATE_BYTES = 512
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """Where a request stands in its caller's trace."""

    trace_id: int
    span_id: int
    flags: int
    state: str = ""  # of other vendors, passed on

    @property
    def id(self) -> str:
        """The trace's, as logs have it."""
        return f"{self.trace_id:032x}"


def trace_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """What the headers of a request say; None if they say nothing, or nonsense, such as two
    parents: a request is not refused for that. Names in lower case."""
    parents, states = [], []
    for name, value in headers:
        if name == PARENT:
            parents.append(value)
        elif name == STATE:
            states.append(value)
    match = _FORM.fullmatch(parents[0].strip()) if len(parents) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id = match[1], int(match[2], 16), int(match[3], 16)
    if version == b"ff" or (version == b"00" and match[5]) or not trace_id or not span_id:
        return None
    state = b",".join(states)  # several are one list, cut in pieces (RFC 9110, 5.3)
    told = state.decode("latin-1") if len(state) <= MOST_STATE_BYTES else ""
    return TraceContext(trace_id, span_id, int(match[4], 16), told)

"""The W3C's trace context: the headers `traceparent` and `tracestate` (w3.org/TR/trace-context).

Here without OpenTelemetry: a server that exports nothing still logs the id that a caller gave.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


def trace_context(headers: Mapping[bytes, bytes]) -> TraceContext | None:
    """What the headers of a request say; None if they say nothing, or nonsense: a request is not
    refused for that. Names in lower case."""
    given = headers.get(PARENT)
    match = _FORM.fullmatch(given.strip()) if given is not None else None
    if match is None:
        return None
    version, trace_id, span_id = match[1], int(match[2], 16), int(match[3], 16)
    if version == b"ff" or (version == b"00" and match[5]) or not trace_id or not span_id:
        return None
    state = headers.get(STATE, b"")
    told = state.decode("latin-1") if len(state) <= MOST_STATE_BYTES else ""
    return TraceContext(trace_id, span_id, int(match[4], 16), told)

"""Formats said more exactly: llguidance's times take a leap second anywhere, its dates 29 February.

Every other format that it knows is as JSON Schema's validators have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.grammar.schema import LISTS, MAPS, SINGLE

_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # not 0000
_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"({_YEAR}-(0[13-9]|1[0-2])-..|{_YEAR}-02-([01].|2[0-8])|{_LEAP}-02-29)"
_TIME = "..:..:[0-5].*"

TIGHTER: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}.{_TIME}$",
}


def tightened(schema: Any) -> Any:
    """A copy of a checked schema in which these formats have a pattern beside them."""
    if not isinstance(schema, Mapping):
        return schema
    out = dict(schema)
    for keyword in MAPS:
        if keyword in out:
            out[keyword] = {name: tightened(sub) for name, sub in out[keyword].items()}
    for keyword in LISTS:
        if keyword in out:
            out[keyword] = [tightened(sub) for sub in out[keyword]]
    for keyword in SINGLE:
        if keyword in out:
            out[keyword] = tightened(out[keyword])
    if (pattern := TIGHTER.get(out.get("format", ""))) is not None:
        out["allOf"] = [*out.get("allOf", []), {"pattern": pattern}]
    return out

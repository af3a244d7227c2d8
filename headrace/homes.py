"""Which worker keeps what: a short tag of it stands in the ids of what outlives a request.

A gateway names the worker that it chose to that worker, in `HEADER`; the worker writes the tag into
the ids that it makes, and whoever reads such an id knows where to go. So no gateway has to remember
anything: another one, or the same after a restart, reads the same. An id without a tag is whole.

    resp_TAG_48 hex digits          a kept response
    PROCESS-TAG-32 hex digits       a resumable stream; its events are STREAM.NUMBER
"""

from __future__ import annotations

import hashlib
import re
import secrets

HEADER = "x-headrace-worker"
TAG_DIGITS = 12  # two of 1000 workers share a tag with a chance of 2e-9
_TAG = rf"[0-9a-f]{{{TAG_DIGITS}}}"
STREAM = rf"[0-9]{{1,6}}-(?:{_TAG}-)?[0-9a-f]{{32}}"  # a pattern without groups
_FIT = re.compile(_TAG)
_RESPONSE = re.compile(rf"resp_({_TAG})_[0-9A-Za-z]+")
_TAGGED_STREAM = re.compile(rf"[0-9]{{1,6}}-({_TAG})-[0-9a-f]{{32}}")


def tag_of(worker: str) -> str:
    """The tag of a worker that its gateways know by this name. The same everywhere."""
    return hashlib.sha256(worker.encode()).hexdigest()[:TAG_DIGITS]


def given_tag(header: str | None) -> str:
    """What a gateway says in `HEADER`; "" for anything that is no tag."""
    return header if header is not None and _FIT.fullmatch(header) else ""


def response_id(tag: str) -> str:
    """A new id; tag: "" = none."""
    return f"resp_{tag}_{secrets.token_hex(24)}" if tag else f"resp_{secrets.token_hex(24)}"


def stream_id(process: int, tag: str) -> str:
    """A new id. process: which HTTP process of the worker holds the stream; tag: "" = none."""
    return (
        f"{process}-{tag}-{secrets.token_hex(16)}" if tag else f"{process}-{secrets.token_hex(16)}"
    )


def tag_in_response(name: str) -> str:
    """Who keeps that response; "" = the id does not say."""
    match = _RESPONSE.fullmatch(name)
    return match[1] if match else ""


def tag_in_stream(name: str) -> str:
    """Who holds that stream; "" = the id does not say."""
    match = _TAGGED_STREAM.fullmatch(name)
    return match[1] if match else ""

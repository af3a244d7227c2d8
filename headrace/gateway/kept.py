"""Requests for what one worker keeps: a response, a conversation that goes on, a stream.

The id says which worker (`headrace.homes`). Such a request goes there or nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headrace.errors import HeadraceError, InvalidRequest, NotFound, NoWorker
from headrace.homes import tag_in_response, tag_in_stream

PREVIOUS = "previous_response_id"
RESPONSES = "/v1/responses"
STREAM_ID = b"x-headrace-stream-id"
LAST_EVENT = b"last-event-id"
METHODS = frozenset({b"GET", b"DELETE"})
_PATH = re.compile(
    r"/v1/(?:responses/(?P<response>[^/]+)(?:/input_items)?|streams/(?P<stream>[^/]+))"
)


class Kept(msgspec.Struct, frozen=True):
    """What a request wants, and the tag of the worker that has it."""

    tag: str
    name: str
    kind: Literal["response", "previous", "stream"]

    @property
    def computes(self) -> bool:
        """A prompt is computed for it; else it gets what is there."""
        return self.kind == "previous"

    def missing(self) -> HeadraceError:
        """The worker is none of ours: told as the worker tells that it has no such thing."""
        if self.kind == "previous":
            return InvalidRequest(
                f"the worker that kept {self.name!r} is not there any more",
                param=PREVIOUS,
                code="previous_response_not_found",
            )
        what = "kept" if self.kind == "response" else "held"
        return NotFound(
            f"the worker that {what} {self.name!r} is not there any more",
            code=f"{self.kind}_not_found",
        )

    def away(self) -> HeadraceError:
        """The worker is ours and does not answer."""
        return NoWorker(f"the worker that has {self.name!r} does not answer now")


def is_kept(path: str) -> bool:
    """Whether the path names something that one worker keeps."""
    return _PATH.fullmatch(path) is not None


def route_of(path: str) -> str:
    """The path with `{id}` for what it names: spans of one route have one name."""
    if (match := _PATH.fullmatch(path)) is None:
        return path
    start, end = match.span(match.lastgroup or 0)
    return path[:start] + "{id}" + path[end:]


def kept_at(path: str, headers: Mapping[bytes, bytes]) -> Kept | None:
    """What path or Last-Event-ID name; None = nothing of one worker.

    Raises NotFound where the path's id names no worker.
    """
    if match := _PATH.fullmatch(path):
        if name := match["response"]:
            kept = Kept(tag_in_response(name), name, "response")
        else:
            kept = Kept(tag_in_stream(match["stream"]), match["stream"], "stream")
        if not kept.tag:
            raise NotFound(
                f"the id {kept.name!r} does not say which worker has it",
                code=f"{kept.kind}_not_found",
            )
        return kept
    if LAST_EVENT not in headers:
        return None
    name = headers[LAST_EVENT].decode("latin-1").rpartition(".")[0]
    tag = tag_in_stream(name)
    return Kept(tag, name, "stream") if tag else None


def kept_before(previous: Any) -> Kept | None:
    """What a body goes on with, if that names a worker."""
    tag = tag_in_response(previous) if isinstance(previous, str) else ""
    return Kept(tag, previous, "previous") if tag else None

"""Compiling: requests that wait for their grammar's matcher, beside the queue and not in it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from headrace.engine.protocol import Grammars, Matcher
from headrace.engine.request import Request
from headrace.errors import HeadraceError, InvalidRequest, RequestFailed

LIMIT_S = 30.0  # from a submit to its matcher
PATIENCE_S = 0.002  # how long a turn that has nothing else to do waits for one


class Compiling:
    """Loop thread only. A request leaves it when its matcher is there, refused or late."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._waiting: list[tuple[Request, Future[Any], float]] = []  # and since when

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def rows(self) -> int:
        """Device rows that all of them will take."""
        return sum(request.rows for request, _, _ in self._waiting)

    def refuse(self) -> None:
        """Raise InvalidRequest where no grammar can be compiled."""
        if self._grammars is None:
            raise InvalidRequest("this engine has no structured output", param="structured_outputs")

    def add(self, request: Request, now: float) -> None:
        """Start to compile the request's grammar."""
        grammar = request.submit.grammar
        assert grammar is not None, "no grammar to compile"
        assert self._grammars is not None, "nobody to compile it"
        self._waiting.append((request, self._grammars.compile(grammar), now))

    def take(self, now: float) -> Iterator[tuple[Request, HeadraceError | None]]:
        """Those that wait no longer: with sequences[0].matcher set, or with what is wrong."""
        if not self._waiting:
            return
        still = []
        for entry in self._waiting:
            request, future, since = entry
            if request.closed:
                continue
            if future.done():
                yield request, _settle(request, future)
            elif now - since > LIMIT_S:
                why = f"the grammar is too complex: it takes over {LIMIT_S:.0f} s to compile"
                yield request, InvalidRequest(why, param="structured_outputs")
            else:
                still.append(entry)
        self._waiting = still

    def pause(self) -> None:
        """Wait a moment for the first of them."""
        wait([f for _, f, _ in self._waiting], timeout=PATIENCE_S, return_when=FIRST_COMPLETED)


def _settle(request: Request, future: Future[Any]) -> HeadraceError | None:
    error = future.exception()
    if error is None:
        matcher: Matcher = future.result()
        request.sequences[0].matcher = matcher.clone()
        return None
    if isinstance(error, HeadraceError):
        return error
    return RequestFailed(f"its grammar was not compiled: {error}")

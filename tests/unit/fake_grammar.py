"""A grammar small enough to see through, behind the engine's own protocol.

A spec is a row of states. A lowercase letter: that token and no other. ".": one of a, b, c, d.
"*": any byte. "~": any number of A, B, C. "!": following it fails. The output ends after the last
state, so that a spec that ends with "~" may end or go on. Compiling "?" is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.backends.fake.model import advance, draw, root
from headrace.errors import InvalidRequest
from headrace.messages import Grammar, Submit

EOS = 258
LOOP = (65, 66, 67)


def _taken(state: str) -> set[int]:
    """The tokens that a state other than "~" takes."""
    if state == "*":
        return set(range(256))
    return set(b"abcd") if state == "." else {ord(state)}


class FakeMatcher:
    """Where a choice stands in its spec."""

    def __init__(self, spec: str, at: int = 0) -> None:
        self.spec, self.at = spec, at

    @property
    def accepts(self) -> bool:
        return not self.spec[self.at :].strip("~")

    @property
    def ended(self) -> bool:
        return self.at == len(self.spec)

    def allowed(self) -> set[int]:
        """Tokens that may follow, the end not counted."""
        out: set[int] = set()
        for state in self.spec[self.at :]:
            if state == "~":
                out |= set(LOOP)
                continue
            out |= _taken(state)
            break
        return out

    def advance(self, token: int) -> None:
        while self.spec[self.at] == "~":
            if token in LOOP:
                return
            self.at += 1
        state = self.spec[self.at]
        if state == "!" or token not in _taken(state):
            raise InvalidRequest(f"token {token} at {self.at} of {self.spec!r}")
        self.at += 1

    def forced(self) -> list[int]:
        out = []
        for state in self.spec[self.at :]:
            if not state.islower():
                break
            out.append(ord(state))
        return out

    def allows(self, token: int) -> bool:
        assert not self.forced(), "a forced token is known without asking"
        return token in self.allowed()

    def check(self) -> None:
        pass

    def clone(self) -> FakeMatcher:
        return FakeMatcher(self.spec, self.at)


class FakeGrammars:
    """Compiles when told: `settle` answers the oldest."""

    end_ids = (EOS,)

    def __init__(self, *, late: bool = False) -> None:
        self.late = late
        self.waiting: list[tuple[Grammar, Future[Any]]] = []
        self.fills = 0  # masks made
        self.closed = False

    def compile(self, grammar: Grammar) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((grammar, future))
        if not self.late:
            self.settle()
        return future

    def settle(self) -> None:
        """Answer the oldest, if one waits."""
        if self.waiting:
            grammar, future = self.waiting.pop(0)
            if grammar.text == "?":
                future.set_exception(InvalidRequest("it is refused"))
            else:
                future.set_result(FakeMatcher(grammar.text))

    def fill(self, matchers: Sequence[FakeMatcher], bits: npt.NDArray[np.int32]) -> None:
        assert matchers, "nothing to fill"
        self.fills += len(matchers)
        words = bits.view(np.uint32)
        for row, matcher in zip(words, matchers, strict=True):
            row[:] = 0
            for token in (*matcher.allowed(), *((EOS,) if matcher.accepts else ())):
                row[token // 32] |= np.uint32(1 << token % 32)

    def warm(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def mask(matcher: FakeMatcher, stop_ids: Sequence[int]) -> npt.NDArray[np.bool_] | None:
    """What a draw may take; None when nothing but the end may follow."""
    allowed = matcher.allowed() - {EOS, *stop_ids}
    if matcher.accepts:
        if not allowed:
            return None
        allowed |= set(stop_ids)
    out = np.zeros(259, np.bool_)
    out[list(allowed)] = True
    return out


def reference(submit: Submit, choice: int, eos: int | None) -> tuple[list[int], str]:
    """All tokens of one choice, one draw at a time, and how it ends."""
    assert submit.grammar is not None
    at, state, ids = FakeMatcher(submit.grammar.text), root(submit.adapter), list(submit.prompt)
    for token in ids:
        state = advance(state, token)
    while len(ids) < len(submit.prompt) + submit.max_tokens:
        bits = mask(at, submit.stop_ids)
        if bits is None:
            return ids[len(submit.prompt) :], "stop"
        drawn = draw(
            state,
            submit.sampling,
            choice,
            len(ids),
            eos,
            ids=ids,
            prompt_tokens=len(submit.prompt),
            mask=bits,
        )
        if drawn is None:
            return ids[len(submit.prompt) :], "error"
        ids.append(drawn)
        state = advance(state, drawn)
        if drawn in submit.stop_ids:
            return ids[len(submit.prompt) :], "stop"
        try:
            at.advance(drawn)
        except InvalidRequest:
            return ids[len(submit.prompt) :], "error"
        if at.ended:
            return ids[len(submit.prompt) :], "stop"
    return ids[len(submit.prompt) :], "length"

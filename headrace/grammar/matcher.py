"""Matcher: where one choice stands in its grammar. Host state: it survives the loss of a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from headrace.errors import InvalidRequest


class Matcher:
    """See `engine.protocol.Matcher`."""

    __slots__ = ("_forced", "_inner")

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner
        self._forced: list[int] | None = None  # what `forced` found since the last token

    @property
    def ended(self) -> bool:
        """The output is complete and nothing may follow."""
        return self._inner.is_stopped()

    @property
    def accepts(self) -> bool:
        """The output may end here."""
        return self._inner.is_accepting()

    def advance(self, token: int) -> None:
        """One more token. Raises InvalidRequest if it does not fit or costs more than it may."""
        self._forced = None
        if not self._inner.consume_token(token):
            self.check()

    def forced(self) -> list[int]:
        """The tokens that can only follow now, as the model's tokenizer would write them."""
        if self._forced is None:
            self._forced = list(self._inner.compute_ff_tokens())
        return self._forced.copy()

    def allows(self, token: int) -> bool:
        """A mask allows `token`, found out without the mask: 2 us instead of 20 to 500.

        Needs: nothing is forced. Then a mask has only the first forced token, where llguidance
        would take other spellings of it.
        """
        return self._inner.validate_tokens([token]) == 1

    def clone(self) -> Matcher:
        """Another one that stands where this one stands."""
        return Matcher(self._inner.deep_copy())

    def check(self) -> None:
        """Raise InvalidRequest if llguidance gave up on it: it is more than may be asked for."""
        if self._inner.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {why(self._inner)}")


def fill(executor: LLExecutor, matchers: Sequence[Matcher], bits: npt.NDArray[np.int32]) -> None:
    """bits [at least len(matchers), words], C order: row i = the tokens that matcher i allows."""
    rows, words = bits.shape
    assert bits.flags.c_contiguous, "a mask with gaps"
    assert len(matchers) <= rows, f"{len(matchers)} matchers, {rows} rows"
    pairs = [(matcher._inner, row) for row, matcher in enumerate(matchers)]
    executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, words * 4, rows)


def why(inner: LLMatcher) -> str:
    """llguidance's error, with the keyword that it does not name."""
    error = inner.get_error()
    if error.startswith("NoExtension"):
        return "nothing can match the grammar: it never comes to an end"
    if error.startswith(("Pointer", "Resource")):
        return f"$ref: {error}"
    if error.startswith(("regex parse error", "lookarounds")):
        return f"pattern: {error}"
    return error

"""Check that an answer that was to be JSON is JSON, and mend it if it can be: `check=json`.

Structured output is JSON by construction, but for what `max_tokens` or a filter cut off.
"""

from __future__ import annotations

import json

from headrace.errors import ConfigError, UnfitAnswer
from headrace.extras import install

MAX_MEND_CHARS = 16_384  # json-repair takes up to 0.3 s for as many


class JsonCheck:
    """`check=json` mends; `check=json:strict` only refuses. An answer that is JSON stays as it is.

    Raises ConfigError if json-repair is needed and not installed.
    """

    def __init__(self, mode: str) -> None:
        if mode not in ("", "repair", "strict"):
            raise ConfigError(f"--hook check=json:{mode}: repair or strict", param="hook")
        self._repair = None
        if mode != "strict":
            try:
                from json_repair import repair_json
            except ImportError:
                raise ConfigError(
                    "--hook check=json needs json-repair, check=json:strict does not: "
                    + install("hooks"),
                    param="hook",
                ) from None
            self._repair = repair_json

    def applies(self, form: str) -> bool:
        """See `Check`."""
        return form == "json"

    def check(self, text: str) -> str:
        """See `Check`."""
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return text
        if self._repair is not None and len(text) <= MAX_MEND_CHARS:
            mended = _mended(self._repair, text)
            if mended is not None:
                return mended
        raise UnfitAnswer("the answer is not whole JSON")


def _mended(repair: object, text: str) -> str | None:
    """Text that is JSON, of the same kind of value; None if there is none in it."""
    assert callable(repair), "json_repair.repair_json"
    try:
        mended = repair(text, ensure_ascii=False)
        value = json.loads(mended)
    except (ValueError, RecursionError):
        return None
    # json-repair makes "" of what holds nothing; a brace that was begun must have become an object.
    kinds = {"{": dict, "[": list}
    wanted = kinds.get(text.lstrip()[:1])
    return mended if wanted is not None and isinstance(value, wanted) else None

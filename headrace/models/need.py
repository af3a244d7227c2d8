"""Reads keys of a config that must be there, of a sane type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError


class Need:
    """`where` and `prefix` are said in errors: `config.json: hidden_size = None, ...`."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix

    def number(self, key: str, usual: float | None = None) -> float:
        """Raises ModelError if it is none. usual: where the key is not there."""
        value = self.data.get(self.prefix + key, usual)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ModelError(f"{self.where}: {self.prefix}{key} = {value!r}, a number is needed")
        return float(value)

    def above_0(self, key: str, usual: float | None = None) -> float:
        """`number`; raises ModelError if it is not above 0 too."""
        value = self.number(key, usual)
        if value <= 0:
            raise ModelError(f"{self.where}: {self.prefix}{key} = {value:g}, above 0 is needed")
        return value

    def count(self, key: str) -> int:
        """Raises ModelError if it is no whole number above 0."""
        value = self.number(key)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.where}: {self.prefix}{key} = {value:g}, a count is needed")
        return int(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Raises ModelError if it is no list of numbers."""
        values = self.data.get(self.prefix + key)
        if not isinstance(values, list) or not all(
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            for value in values
        ):
            raise ModelError(f"{self.where}: {self.prefix}{key} = {values!r}, numbers are needed")
        return tuple(map(float, values))


def head_width(hidden: int, heads: int) -> int:
    """hidden / heads. Raises ModelError if that is no whole number."""
    if hidden % heads:
        raise ModelError(f"{heads} heads do not divide a hidden size of {hidden}")
    return hidden // heads


def refuse(architecture: str, reasons: Mapping[str, bool]) -> None:
    """Raises ModelError naming the reasons that hold."""
    found = [name for name, present in reasons.items() if present]
    if found:
        raise ModelError(f"{architecture} with {', '.join(found)} is not supported")

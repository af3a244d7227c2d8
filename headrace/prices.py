"""The price sheet: what tokens and device time cost, as an operator writes it."""

from __future__ import annotations

import math

import msgspec

from headrace.errors import ConfigError

PER_TOKENS = 1_000_000  # prices of tokens are for so many
SECONDS_AN_HOUR = 3600
_KEY = "prices"


class Prices(msgspec.Struct, frozen=True):
    """Amounts of `currency`. None: not priced."""

    input: float | None = None  # a million prompt tokens that no cache held
    cached: float | None = None  # a million that one held; None: as `input`
    output: float | None = None  # a million, reasoning included
    device_hour: float | None = None  # an hour of the device
    currency: str = "USD"

    def cost(
        self, input_tokens: int, cached_tokens: int, output_tokens: int, compute_s: float
    ) -> float | None:
        """What a request costs; None where nothing has a price. `input_tokens` include the cached
        ones, `compute_s` is its share of the device's time."""
        if self.input is self.output is self.device_hour is self.cached is None:
            return None
        cached = self.input if self.cached is None else self.cached
        tokens = (
            (self.input or 0.0) * (input_tokens - cached_tokens)
            + (cached or 0.0) * cached_tokens
            + (self.output or 0.0) * output_tokens
        )
        hours = compute_s / SECONDS_AN_HOUR
        return tokens / PER_TOKENS + (self.device_hour or 0.0) * hours


def parse_prices(text: str) -> Prices:
    """`input=0.15,cached=0.075,output=0.6` or `device_hour=2.5,currency=EUR`.

    Raises ConfigError naming the item.
    """
    values: dict[str, float | str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        where = f"{_KEY}: {item}"
        if name not in Prices.__struct_fields__:
            names = ", ".join(Prices.__struct_fields__)
            raise ConfigError(f"{where}: one of {names}", param=_KEY)
        if name in values:
            raise ConfigError(f"{where}: given twice", param=_KEY)
        values[name] = _currency(where, value) if name == "currency" else _amount(where, value)
    return msgspec.convert(values, Prices)


def _amount(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where}: an amount from 0", param=_KEY)
    return value


def _currency(where: str, text: str) -> str:
    if not (len(text) == 3 and text.isascii() and text.isalpha() and text.isupper()):
        raise ConfigError(f"{where}: three capital letters, such as EUR", param=_KEY)
    return text

"""The price sheet: what it says, and what it refuses."""

from __future__ import annotations

import pytest

from headrace.config import load
from headrace.errors import ConfigError
from headrace.prices import Prices, parse_prices


def test_tokens_and_device_time_have_prices_of_their_own() -> None:
    prices = parse_prices(" input=2, cached=0.5 ,output=8,device_hour=3.6,currency=EUR")
    assert prices == Prices(2.0, 0.5, 8.0, 3.6, "EUR")
    cost = prices.cost(1000, 400, 100, 10.0)
    assert cost == pytest.approx((600 * 2 + 400 * 0.5 + 100 * 8) / 1e6 + 10 * 3.6 / 3600)


def test_cached_tokens_cost_as_input_where_they_have_no_price() -> None:
    assert parse_prices("input=1").cost(1_000_000, 250_000, 5, 1.0) == pytest.approx(1.0)
    assert parse_prices("input=1,cached=0").cost(1_000_000, 250_000, 5, 1.0) == pytest.approx(0.75)


def test_no_price_is_no_cost_and_a_price_of_nothing_is_one() -> None:
    assert parse_prices("").cost(10, 0, 10, 1.0) is None
    assert parse_prices("currency=CHF").cost(10, 0, 10, 1.0) is None
    assert parse_prices("output=0").cost(10, 0, 10, 1.0) == 0.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("inputs=1", "inputs=1"),
        ("input", "input"),
        ("input=-1", "input=-1"),
        ("input=nan", "input=nan"),
        ("input=inf", "input=inf"),
        ("input=1,input=2", "given twice"),
        ("currency=eur", "currency=eur"),
    ],
)
def test_a_wrong_sheet_is_refused_at_the_start(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        load({"prices": text}, environ={})
    assert caught.value.param == "prices"

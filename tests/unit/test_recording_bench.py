"""The benchmark of recording: its sums, what a light record goes through, a level with a page."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.recording import KINDS, Figure, beside, change, direct_us, ratios


def test_an_interval_by_hand() -> None:
    """Of 1.00, 1.02 and 0.98: t(2) = 4.303, their logarithms' deviation 0.02000."""
    found = change([1.0, 1.02, 0.98])
    assert found.rounds == 3
    assert found.per_cent == pytest.approx(-0.0133, abs=1e-3)
    assert found.low == pytest.approx(-4.86, abs=0.02)
    assert found.high == pytest.approx(5.08, abs=0.02)


def test_each_round_is_held_against_its_own_off() -> None:
    def round_of(off: float, light: float) -> dict[str, list[Figure]]:
        rates = dict.fromkeys(KINDS, off) | {"light": light}
        return {
            kind: [Figure(rate - 1, 1.0, 1.0), Figure(rate + 1, 3.0, 1.0)]
            for kind, rate in rates.items()
        }

    rounds = [round_of(100, 99), round_of(50, 49.5)]
    assert ratios(rounds, "light", "tokens_per_s") == pytest.approx([0.99, 0.99])
    assert ratios(rounds, "full", "cpu_us_per_token") == [1.0, 1.0]


def test_a_light_record_goes_through_all_its_calls() -> None:
    assert direct_us(times=10) > 0


def test_what_breaks_beside_a_level_is_raised() -> None:
    async def breaks() -> None:
        raise ValueError("of the page")

    async def run() -> None:
        async with beside(breaks()):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    with pytest.raises(ValueError, match="of the page"):
        asyncio.run(run())

"""Costs are whole numbers of 1e-12 USD, so that they add up to tokens times the table exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest

from causeway_server.router.prices import FREE, PICO_USD, Price
from causeway_server.router.trackers import SpendTracker
from causeway_server.router.types import Usage

MINI = Price(0.15, 0.6, cached_input=0.075)
FINE = Price(0.0375, 0.15, cached_input=0.00255, per_request=0.012, audio_second=0.0001)


@pytest.mark.parametrize(
    ("price", "usage", "pico_usd"),
    [
        (MINI, Usage(1000, 100), 1000 * 150_000 + 100 * 600_000),
        (MINI, Usage(1000, 100, cached_tokens=400), 600 * 150_000 + 400 * 75_000 + 100 * 600_000),
        (MINI, Usage(10, 0, cached_tokens=400), 10 * 75_000),  # a server may count more than the prompt
        (MINI, Usage(10, 5, reasoning_tokens=4), 10 * 150_000 + 5 * 600_000),  # thoughts are part of the answer
        (Price(1.0), Usage(10, 5, cached_tokens=4), 10 * 1_000_000),  # without a price of their own, as others
        (Price(1.0, cached_input=0.0), Usage(10, 5, cached_tokens=4), 6 * 1_000_000),
        (FINE, Usage(1, 1), 37_500 + 150_000 + 12 * 10**9),
        (FINE, Usage(audio_ms=1500), 12 * 10**9 + 150 * 10**6),
        (FINE, Usage(), 0),
        (FREE, Usage(1000, 100, audio_ms=1500), 0),
        (Price(1_000_000.0), Usage(1), PICO_USD),
    ],
)
def test_the_cost_of_a_request(price: Price, usage: Usage, pico_usd: int) -> None:
    assert usage.pico_usd(price) == pico_usd


@pytest.mark.parametrize("price", [MINI, FINE], ids=["mini", "fine"])
def test_costs_add_up_to_tokens_times_the_table_and_so_does_spending(price: Price) -> None:
    tracker, total, table = SpendTracker(), 0, Fraction(0)
    for number in range(1, 2000):
        usage = Usage(number * 7, number * 3, cached_tokens=number * 2)
        cost = usage.pico_usd(price)
        tracker.add(cost / PICO_USD, 0.0)
        total += cost
        table += Fraction(str(price.input)) * number * 5 + Fraction(str(price.cached_input)) * number * 2
        table += Fraction(str(price.output)) * number * 3 + Fraction(str(price.per_request)) * 10**6
    assert total == table / 10**6 * PICO_USD
    assert round((tracker.signals(0.0).usd_today or 0.0) * PICO_USD) == total


@pytest.mark.parametrize(
    ("price", "problem"),
    [
        (MINI, ""),
        (FREE, ""),
        (Price(of="openai/gpt-4o-mini", table="genai-prices 0.2.3", input=0.15), ""),
        (Price(of="openai/gpt-4o-mini"), "`causeway-models prices FILE`"),
        (Price(1.0, table="genai-prices 0.2.3"), "without `of`"),
        (Price(1.0, cached_input=1.5), "higher `cached_input` than `input`"),
    ],
)
def test_a_price_that_cannot_be_counted_says_what_to_write(price: Price, problem: str) -> None:
    assert problem in price.problem
    assert (price.problem == "") == (problem == "")

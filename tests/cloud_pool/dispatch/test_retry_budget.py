"""The budget, for any order of requests and attempts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from causeway_server.cloud_pool.dispatch.dispatcher import RetryBudget

EVENTS = st.lists(
    st.tuples(st.sampled_from(["request", "spend"]), st.floats(min_value=0.0, max_value=30.0, allow_nan=False)),
    max_size=300,
)
SHARES = st.floats(min_value=0.0, max_value=1.0)
ROUNDING = 1e-6


@pytest.mark.slow
@settings(deadline=None)
@given(EVENTS, SHARES)
def test_without_a_minimum_extras_never_exceed_their_share(events: list[tuple[str, float]], share: float) -> None:
    budget = RetryBudget(share, min_retries_per_s=0.0)
    now, requests, extras = 1000.0, 0, 0
    for what, pause in events:
        now += pause
        if what == "request":
            budget.count_request(now)
            requests += 1
        else:
            extras += budget.try_spend(now)
        assert extras <= share * requests + ROUNDING


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(min_value=3, max_value=400), st.integers(min_value=1, max_value=3))
def test_a_busy_tier_is_never_above_its_share(rate: int, wanted: int) -> None:
    """At any steady rate from min / share on, amplification stays ≤ 1.2 (plus what the minimum had lent before)."""
    budget = RetryBudget(0.2, min_retries_per_s=0.5, window_s=10.0)
    extras, requests = 0, 25 * rate
    for number in range(requests):
        now = number / rate
        budget.count_request(now)
        extras += sum(budget.try_spend(now) for _ in range(wanted))
    assert extras <= 0.2 * requests + 0.5 * 10.0


@settings(deadline=None)
@given(EVENTS)
def test_within_a_window_extras_stay_below_share_or_minimum(events: list[tuple[str, float]]) -> None:
    budget = RetryBudget(0.2, min_retries_per_s=0.5, window_s=10.0)
    counted: list[float] = []
    taken: list[float] = []
    now = 0.0
    for what, pause in events:
        now += pause
        if what == "request":
            budget.count_request(now)
            counted.append(now)
        elif budget.try_spend(now):
            taken.append(now)
            began = now // 1.0 - 9
            requests = sum(when // 1.0 >= began for when in counted)
            assert sum(when // 1.0 >= began for when in taken) <= max(0.2 * requests, 5.0) + ROUNDING


def test_a_spent_budget_is_restored_after_its_window() -> None:
    budget = RetryBudget(0.2, min_retries_per_s=0.5, window_s=10.0)
    assert [budget.try_spend(0.5) for _ in range(7)] == [True] * 5 + [False] * 2
    assert budget.left(0.5) == 0.0
    assert not budget.try_spend(9.9)
    assert budget.left(10.0) == 5.0
    assert budget.try_spend(10.0)


def test_the_budget_survives_a_clock_that_stands_still_or_jumps() -> None:
    budget = RetryBudget(0.5, min_retries_per_s=0.0, window_s=10.0)
    for _ in range(10):
        budget.count_request(7.0)
    assert sum(budget.try_spend(7.0) for _ in range(10)) == 5
    assert budget.left(1e9) == 0.0

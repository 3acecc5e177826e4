"""The token bucket, and that Redis does the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.accounts.tenants.rate_limiter import TokenBucket

LEVELS = st.floats(-1000, 1000)
TIMES = st.floats(0, 1e6)
RATES = st.floats(0.01, 1000)


def test_filling() -> None:
    """It gains `rate` a second up to its capacity, and says how long an amount takes."""
    bucket = TokenBucket(0.0, 0.0).refilled(2.0, 10.0, 3.0)
    assert bucket.level == 6.0
    assert bucket.wait_s(2.0, 9.0) == 1.5
    assert bucket.wait_s(2.0, 6.0) == 0.0
    assert bucket.refilled(2.0, 10.0, 100.0).level == 10.0


def test_debt() -> None:
    """What was used beyond what was there is waited for; what was given back never overflows."""
    assert TokenBucket(1.0, 0.0).debited(5.0, 10.0).wait_s(2.0, 1.0) == 2.5
    assert TokenBucket(9.0, 0.0).debited(-5.0, 10.0).level == 10.0


@given(LEVELS, TIMES, TIMES, RATES)
def test_never_above_capacity_and_never_less_by_waiting(level: float, at: float, now: float, rate: float) -> None:
    """Time only adds, up to the capacity; a clock that goes back takes nothing."""
    filled = TokenBucket(level, at).refilled(rate, 1000.0, now)
    assert level <= filled.level <= 1000.0


@given(LEVELS, RATES, st.floats(0, 1000))
def test_waiting_is_enough(level: float, rate: float, amount: float) -> None:
    """After the time it names, the amount is there."""
    bucket = TokenBucket(level, 0.0)
    wait_s = bucket.wait_s(rate, amount)
    assert bucket.refilled(rate, 1000.0, wait_s).level >= amount - 1e-6 * (1 + abs(level))


@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_no_more_than_rate_and_capacity(rate: float) -> None:
    """Whatever the moments of asking, over a time never more is given than the capacity and the rate allow."""
    bucket, given_out = TokenBucket(5.0, 0.0), 0
    for step in range(1000):
        bucket = bucket.refilled(rate, 5.0, step * 0.1)
        if bucket.wait_s(rate, 1.0) == 0:
            bucket, given_out = bucket.debited(1.0, 5.0), given_out + 1
    assert 5 + rate * 99.9 - 1 <= given_out <= 5 + rate * 99.9

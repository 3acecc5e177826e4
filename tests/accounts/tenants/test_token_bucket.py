"""The local token bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.accounts.tenants.local_limits import TokenBucket

LEVELS = st.floats(-1000, 1000)
TIMES = st.floats(0, 1e6)
RATES = st.floats(0.01, 1000)


def test_a_bucket_refills_up_to_its_capacity() -> None:
    bucket = TokenBucket(0.0, 0.0).refilled(2.0, 10.0, 3.0)
    assert bucket.level == 6.0
    assert bucket.wait_s(2.0, 9.0) == 1.5
    assert bucket.wait_s(2.0, 6.0) == 0.0
    assert bucket.refilled(2.0, 10.0, 100.0).level == 10.0


def test_debts_delay_and_refunds_never_overflow() -> None:
    assert TokenBucket(1.0, 0.0).debited(5.0, 10.0).wait_s(2.0, 1.0) == 2.5
    assert TokenBucket(9.0, 0.0).debited(-5.0, 10.0).level == 10.0


@given(LEVELS, TIMES, TIMES, RATES)
def test_time_only_adds_up_to_the_capacity(level: float, at: float, now: float, rate: float) -> None:
    """Also when the clock goes back."""
    filled = TokenBucket(level, at).refilled(rate, 1000.0, now)
    assert level <= filled.level <= 1000.0


@given(LEVELS, RATES, st.floats(0, 1000))
def test_wait_s_is_long_enough(level: float, rate: float, amount: float) -> None:
    bucket = TokenBucket(level, 0.0)
    wait_s = bucket.wait_s(rate, amount)
    assert bucket.refilled(rate, 1000.0, wait_s).level >= amount - 1e-6 * (1 + abs(level))


@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_no_more_is_granted_than_capacity_and_rate_allow(rate: float) -> None:
    bucket, given_out = TokenBucket(5.0, 0.0), 0
    for step in range(1000):
        bucket = bucket.refilled(rate, 5.0, step * 0.1)
        if bucket.wait_s(rate, 1.0) == 0:
            bucket, given_out = bucket.debited(1.0, 5.0), given_out + 1
    assert 5 + rate * 99.9 - 1 <= given_out <= 5 + rate * 99.9

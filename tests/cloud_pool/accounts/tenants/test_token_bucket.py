"""The local token bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.accounts.tenants.rate_limiter import TokenBucket

LEVELS = st.floats(-1000, 1000)
TIMES = st.floats(0, 1e6)
RATES = st.floats(0.01, 1000)


def refilled(bucket: TokenBucket, now: float) -> TokenBucket:
    bucket.refill(now)
    return bucket


def test_a_bucket_refills_up_to_its_capacity() -> None:
    bucket = refilled(TokenBucket(2.0, 10.0, 0.0, 0.0), 3.0)
    assert bucket.level == 6.0
    assert bucket.wait_s(9.0) == 1.5
    assert bucket.wait_s(6.0) == 0.0
    assert refilled(bucket, 100.0).level == 10.0


def test_debts_delay_and_refunds_never_overflow() -> None:
    indebted, full = TokenBucket(2.0, 10.0, 1.0, 0.0), TokenBucket(2.0, 10.0, 9.0, 0.0)
    indebted.debit(5.0)
    full.debit(-5.0)
    assert (indebted.wait_s(1.0), full.level) == (2.5, 10.0)


@given(LEVELS, TIMES, TIMES, RATES)
def test_time_only_adds_up_to_the_capacity(level: float, at: float, now: float, rate: float) -> None:
    """Also when the clock goes back."""
    filled = refilled(TokenBucket(rate, 1000.0, level, at), now)
    assert level <= filled.level <= 1000.0


@given(LEVELS, RATES, st.floats(0, 1000))
def test_wait_s_is_long_enough(level: float, rate: float, amount: float) -> None:
    bucket = TokenBucket(rate, 1000.0, level, 0.0)
    wait_s = bucket.wait_s(amount)
    assert refilled(bucket, wait_s).level >= amount - 1e-6 * (1 + abs(level))


@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_no_more_is_granted_than_capacity_and_rate_allow(rate: float) -> None:
    bucket, given_out = TokenBucket(rate, 5.0, 5.0, 0.0), 0
    for step in range(1000):
        if refilled(bucket, step * 0.1).wait_s(1.0) == 0:
            bucket.debit(1.0)
            given_out += 1
    assert 5 + rate * 99.9 - 1 <= given_out <= 5 + rate * 99.9

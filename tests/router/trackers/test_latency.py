"""Means that decay with time, and quantiles of a window."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.trackers import Ewma, Window


def test_one_sample_is_the_mean_until_it_expires() -> None:
    mean = Ewma(10.0)
    assert mean.value(0.0) is None
    mean.add(42.0, 0.0)
    assert mean.value(0.0) == 42.0
    assert mean.value(59.0) == pytest.approx(42.0)
    assert mean.value(61.0) is None


def test_a_half_life_later_a_sample_weighs_half() -> None:
    """(100/2 + 0) / (1/2 + 1) = 33.3."""
    mean = Ewma(10.0)
    mean.add(100.0, 0.0)
    mean.add(0.0, 10.0)
    assert mean.value(10.0) == pytest.approx(100 / 3)


def test_samples_of_one_moment_all_count() -> None:
    mean = Ewma(10.0)
    for value in (10.0, 20.0, 60.0):
        mean.add(value, 5.0)
    assert mean.value(5.0) == pytest.approx(30.0)


def test_a_clock_that_goes_back_counts_as_no_time_passed() -> None:
    mean = Ewma(10.0)
    mean.add(10.0, 100.0)
    mean.add(20.0, 50.0)
    assert mean.value(50.0) == pytest.approx(15.0)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 100)), min_size=1, max_size=50))
def test_the_mean_stays_within_its_samples(samples: list[tuple[float, float]]) -> None:
    mean, now = Ewma(7.0), 0.0
    for value, wait_s in samples:
        now += wait_s
        mean.add(value, now)
    found = mean.value(now)
    assert found is not None
    values = [value for value, _ in samples]
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6


def test_quantiles_are_samples() -> None:
    window = Window(60.0)
    for value in range(1, 101):
        window.add(float(value), 0.0)
    assert [window.quantile(q, 0.0) for q in (0.0, 0.07, 0.5, 0.95, 0.99, 1.0)] == [1, 7, 50, 95, 99, 100]


def test_samples_older_than_the_window_are_dropped() -> None:
    window = Window(60.0)
    window.add(1.0, 0.0)
    window.add(9.0, 30.0)
    assert window.quantile(0.0, 59.0) == 1.0
    assert window.quantile(0.0, 60.0) == 9.0
    assert window.count(60.0) == 1
    assert window.quantile(0.5, 90.0) is None


def test_a_share_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a share"):
        Window(60.0).quantile(99.0, 0.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80), st.floats(0, 1))
def test_a_share_q_of_the_samples_does_not_exceed_the_quantile(values: list[float], q: float) -> None:
    window = Window(60.0, size=32)
    for value in values:
        window.add(value, 0.0)
    kept = values[-32:]
    found = window.quantile(q, 0.0)
    assert found in kept
    assert sum(value <= found for value in kept) >= math.floor(q * len(kept))

"""Scaling ahead of load, on traces with fixed seeds; the command measures more of them."""

from __future__ import annotations

import pytest

from .scaling import DAY, WEEK, Forecast, scale, trace

pytestmark = pytest.mark.slow


def test_fewer_requests_are_late_for_about_the_same_replica_hours() -> None:
    """Over three weeks, of which the first one teaches."""
    requests = trace(1, season=True)
    plain, ahead = scale(requests, ahead=False), scale(requests, ahead=True)
    assert ahead.late <= 0.6 * plain.late
    assert ahead.replica_hours <= 1.1 * plain.replica_hours


def test_weeks_without_a_season_are_no_worse() -> None:
    requests = trace(1, season=False)
    plain, ahead = scale(requests, ahead=False), scale(requests, ahead=True)
    assert ahead.late <= 1.02 * plain.late
    assert ahead.replica_hours <= 1.02 * plain.replica_hours


def test_a_forecast_that_failed_yesterday_is_silent() -> None:
    """The step of each day comes at 8:00 for a week, and then at 15:00."""
    forecast = Forecast()
    expected = [forecast.after(400.0 if step % DAY >= DAY // 3 else 100.0) for step in range(WEEK + 2 * DAY)]
    assert expected[WEEK + DAY + DAY // 3 - 10] == pytest.approx(400.0)
    late = [forecast.after(400.0 if step % DAY >= 5 * DAY // 8 else 100.0) for step in range(2 * DAY)]
    assert max(late[DAY:]) == 0.0

"""Spending: rolling hour, local day and month, restarts and wrong clocks."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from causeway_server.router.trackers import SpendState, SpendTracker

ZONE = timezone(timedelta(hours=2))


def at(month: int, day: int, hour: int = 12, minute: int = 0, year: int = 2026) -> float:
    return datetime(year, month, day, hour, minute, tzinfo=ZONE).timestamp()


def test_nothing_spent_is_zero_and_not_absent() -> None:
    signals = SpendTracker(ZONE).signals(at(3, 1))
    assert (signals.usd_hour, signals.usd_today, signals.usd_month) == (0, 0, 0)


def test_the_hour_rolls() -> None:
    spend = SpendTracker(ZONE)
    spend.add(1.0, at(3, 1, 12, 0))
    spend.add(2.0, at(3, 1, 12, 30))
    assert spend.signals(at(3, 1, 12, 59)).usd_hour == 3.0
    assert spend.signals(at(3, 1, 13, 0)).usd_hour == 2.0
    assert spend.signals(at(3, 1, 13, 30)).usd_hour == 0.0
    assert spend.signals(at(3, 1, 13, 30)).usd_today == 3.0


def test_the_day_and_the_month_are_local() -> None:
    spend = SpendTracker(ZONE)
    spend.add(1.0, at(3, 31, 23, 59))
    before, after = spend.signals(at(3, 31, 23, 59)), spend.signals(at(4, 1, 0, 1))
    assert (before.usd_today, before.usd_month) == (1.0, 1.0)
    assert (after.usd_today, after.usd_month, after.usd_hour) == (0.0, 0.0, 1.0)


def test_the_month_is_the_sum_of_its_days() -> None:
    spend = SpendTracker(ZONE)
    for day in (28, 31):
        spend.add(5.0, at(3, day))
    for day in (1, 2, 30):
        spend.add(1.0, at(4, day))
    assert spend.signals(at(4, 30)).usd_month == 3.0


def test_a_restart_forgets_nothing() -> None:
    spend = SpendTracker(ZONE)
    spend.add(1.5, at(3, 1, 12, 0))
    spend.add(2.5, at(3, 2, 11, 30))
    again = SpendTracker(ZONE, restored=spend.state())
    assert again.signals(at(3, 2, 12, 0)) == spend.signals(at(3, 2, 12, 0))
    assert again.state() == spend.state()
    assert SpendTracker(ZONE, restored=SpendState()).signals(at(3, 1)).usd_month == 0


def test_a_clock_that_jumps_forth_and_back_loses_no_spending() -> None:
    spend = SpendTracker(ZONE)
    spend.add(3.0, at(3, 1, 12, 0))
    spend.add(1.0, at(1, 1, 0, 0, year=1970))
    spend.add(1.0, at(1, 1, 0, 0, year=2099))
    assert spend.signals(at(3, 1, 12, 1)).usd_today == 3.0


def test_a_clock_that_steps_back_keeps_the_hour() -> None:
    spend = SpendTracker(ZONE)
    spend.add(3.0, at(3, 1, 12, 10))
    assert spend.signals(at(3, 1, 12, 0)).usd_hour == 3.0


def test_memory_is_bounded_and_keeps_the_current_month() -> None:
    spend = SpendTracker(ZONE)
    start = at(1, 1)
    for day in range(800):
        spend.add(1.0, start + day * 86400.0)
    state = spend.state()
    assert len(state.days) <= 62
    assert len(state.minutes) <= 120
    now = start + 799 * 86400.0
    assert spend.signals(now).usd_month == datetime.fromtimestamp(now, ZONE).day


@pytest.mark.parametrize("usd", [-1.0, float("nan"), float("inf")])
def test_an_amount_that_is_not_finite_is_refused(usd: float) -> None:
    """A NaN would make every sum a NaN, and no cap would ever be reached."""
    spend = SpendTracker(ZONE)
    with pytest.raises(ValueError, match="Expected an amount"):
        spend.add(usd, at(3, 1))
    assert spend.signals(at(3, 1)).usd_hour == 0

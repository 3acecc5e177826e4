"""Standing queues and the release rate: pure, with a clock that is a number."""

from __future__ import annotations

import pytest

from causeway_server.cloud_pool.admission.concurrency_limit import INTERVAL_S, OverloadDetector, ReleaseRate

OBJECTIVE_S = 2.0


def waits(overload: OverloadDetector, begins: float, ends: float, seconds: float) -> None:
    """Standard work is admitted ten times a second, after so long."""
    for tick in range(int(begins * 10), int(ends * 10)):
        overload.record_wait(tick / 10, "standard", seconds)


def test_a_burst_is_no_standing_queue() -> None:
    overload = OverloadDetector(OBJECTIVE_S)
    waits(overload, 0.0, INTERVAL_S * 0.9, 5.0)
    overload.record_wait(0.95, "standard", 0.1)
    waits(overload, 1.0, 1.0 + INTERVAL_S * 0.9, 5.0)
    assert not overload.is_standing(1.9, "standard")
    assert not overload.should_shed(1.9, "bulk")


def test_a_standing_queue_sheds_lower_priorities() -> None:
    """Bulk at once; standard only for interactive, and an interval later."""
    overload = OverloadDetector(OBJECTIVE_S)
    waits(overload, 0.0, 3.0, 5.0)
    assert overload.is_standing(3.0, "standard")
    assert overload.should_shed(3.0, "bulk")
    assert not overload.should_shed(3.0, "standard")
    for tick in range(22):
        overload.record_wait(3.0 + tick / 10, "interactive", 5.0)
        assert overload.should_shed(3.0 + tick / 10, "standard") == (tick >= 20)
    assert not overload.should_shed(5.1, "interactive")


def test_a_standing_queue_ends_without_flapping() -> None:
    overload = OverloadDetector(OBJECTIVE_S)
    waits(overload, 0.0, 3.0, 5.0)
    seen = []
    for tick in range(30, 90):
        overload.record_wait(tick / 10, "standard", 1.9 if tick % 2 else 2.1)
        seen.append(overload.is_standing(tick / 10, "standard"))
    assert all(seen)
    waits(overload, 9.0, 9.0 + INTERVAL_S, 0.2)
    assert not overload.is_standing(9.0 + INTERVAL_S, "standard")
    waits(overload, 20.0, 23.0, 5.0)
    assert overload.is_standing(23.0, "standard")
    assert not overload.is_standing(23.0 + INTERVAL_S, "standard")


def drained(drain: ReleaseRate, begins: float, ends: float, rate: float, *, full: bool = True) -> None:
    """Release permits at this rate, each held for two seconds."""
    for tick in range(1, round((ends - begins) * rate) + 1):
        drain.tick(begins + tick / rate, full=full)
        drain.record_release(2.0, round(2 * rate))
        drain.record_grant("interactive" if tick % 2 else "bulk")


def test_the_release_rate_counts_time_with_waiters_only() -> None:
    drain = ReleaseRate(0.0)
    assert drain.rate is None
    drained(drain, 0.0, 20.0, 8.0)
    assert drain.rate == pytest.approx(8.0, rel=0.1)
    drained(drain, 20.0, 80.0, 1.0, full=False)
    drained(drain, 80.0, 100.0, 4.0)
    assert drain.rate == pytest.approx(4.0, rel=0.15)


def test_a_lower_priority_has_what_is_left_of_the_rate() -> None:
    drain = ReleaseRate(0.0)
    drained(drain, 0.0, 60.0, 8.0)
    assert drain.rate_for("interactive", 1.0) == pytest.approx(8.0, rel=0.1)
    assert drain.rate_for("bulk", 0.05) == pytest.approx(4.0, rel=0.2)
    assert drain.rate_for("bulk", 0.9) == pytest.approx(7.2, rel=0.1)


def test_a_new_queue_starts_with_littles_law() -> None:
    drain = ReleaseRate(0.0)
    for tick in range(40):
        drain.tick(float(tick), full=False)
        drain.record_release(2.0, 16)
    drain.tick(39.05, full=True)
    assert drain.rate == pytest.approx(8.0, rel=0.05)


def test_the_rate_of_a_stuck_tier_falls_to_zero() -> None:
    drain = ReleaseRate(0.0)
    drained(drain, 0.0, 20.0, 8.0)
    for second in range(21, 80):
        drain.tick(float(second), full=True)
    assert drain.rate is not None
    assert drain.rate < 0.01

"""What is known about times to first token, and when nothing is."""

from __future__ import annotations

from cloud_pool.dispatch.pace import Pace


def test_too_few_samples_say_nothing() -> None:
    """No hedge and no refusal is founded on a handful of answers."""
    pace = Pace()
    for number in range(7):
        pace.first_token("a", 0.1, float(number) / 10)
    assert pace.slow_s(1.0) is None
    assert pace.soonest_s("a", 1.0) == 0.0
    assert pace.soonest_s("never seen", 1.0) == 0.0


def test_slow_is_of_the_tier_and_soonest_of_the_endpoint() -> None:
    """A fast and a slow endpoint have one tail together and a start each."""
    pace = Pace(slow=0.95)
    for number in range(100):
        pace.first_token("fast", 0.1, number / 100)
        pace.first_token("slow", 1.0, number / 100)
    assert pace.slow_s(1.0) == 1.0
    assert pace.soonest_s("fast", 1.0) == 0.1
    assert pace.soonest_s("slow", 1.0) == 1.0


def test_a_rush_is_soon_forgotten() -> None:
    """What was slow five seconds ago keeps nobody away now."""
    pace = Pace()
    for number in range(100):
        pace.first_token("a", 9.0, number / 100)
    assert pace.soonest_s("a", 1.0) == 9.0
    assert pace.soonest_s("a", 6.1) == 0.0


def test_who_was_given_up_counts_as_slow() -> None:
    """A try cancelled for another's answer is a sample too: else hedging would hide what it is for."""
    pace = Pace(slow=0.9)
    for number in range(20):
        pace.first_token("a", 0.1, number / 100)
    assert pace.slow_s(0.2) == 0.1
    for number in range(20):
        pace.given_up(3.0, 0.2 + number / 100)
    assert pace.slow_s(1.0) == 3.0


def test_endpoints_that_went_are_dropped() -> None:
    """Addresses from DNS come and go for months; only those lately heard of are kept."""
    pace = Pace()
    for number in range(1000):
        pace.first_token(f"10.0.0.{number}", 0.1, float(number))
    assert len(pace._endpoints) < 10

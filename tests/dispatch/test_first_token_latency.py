"""What is known about times to first token, and when nothing is."""

from __future__ import annotations

from cloud_pool.dispatch.first_token_latency import FirstTokenLatency


def test_too_few_samples_say_nothing() -> None:
    """No hedge and no refusal is founded on a handful of answers."""
    pace = FirstTokenLatency()
    for number in range(7):
        pace.first_token("a", 0.1, float(number) / 10)
    assert pace.late_s(1.0) is None
    assert pace.fastest_s("a", 1.0) == 0.0
    assert pace.fastest_s("never seen", 1.0) == 0.0


def test_one_slow_endpoint_does_not_say_what_is_late() -> None:
    """Of two endpoints the quicker one does, however many asks the slow one has; each has a soonest of its own."""
    pace = FirstTokenLatency(late=0.95)
    for number in range(100):
        pace.first_token("quick", 0.1, number / 100)
        pace.first_token("slow", 1.0, number / 100)
    assert pace.late_s(1.0) == 0.1
    assert pace.fastest_s("quick", 1.0) == 0.1
    assert pace.fastest_s("slow", 1.0) == 1.0


def test_one_quick_endpoint_of_three_does_not_either() -> None:
    """What most of them need is what counts."""
    pace = FirstTokenLatency(late=0.95)
    for number in range(100):
        pace.first_token("lucky", 0.1, number / 100)
        for address in ("a", "b"):
            pace.first_token(address, 1.0, number / 100)
    assert pace.late_s(1.0) == 1.0


def test_late_is_a_quantile_of_the_last_minute() -> None:
    """Nineteen of twenty come sooner; what was a minute ago is forgotten."""
    pace = FirstTokenLatency(late=0.95)
    for number in range(1, 101):
        pace.first_token("a", number / 100, number / 100)
    assert pace.late_s(1.0) == 0.95
    assert pace.late_s(62.0) is None


def test_very_late_is_more_than_one_in_a_hundred_needs() -> None:
    """Where all first tokens take about the same time that is soon; where few are known, or some take very long, it is
    twice what is late."""
    pace = FirstTokenLatency(late=0.95)
    assert pace.very_late_s(0.0) is None
    for number in range(50):
        pace.first_token("a", 0.1, number / 100)
    assert pace.very_late_s(0.6) == 0.2
    for number in range(100):
        pace.first_token("a", 0.1 + number / 10_000, 1.0 + number / 100)
    late_s, very_late_s = pace.late_s(2.0), pace.very_late_s(2.0)
    assert late_s is not None
    assert very_late_s is not None
    assert late_s < very_late_s < 1.2 * late_s
    for number in range(10):
        pace.given_up("a", 9.0, 2.0 + number / 100)
    for number in range(180):
        pace.first_token("a", 0.1, 3.0 + number / 100)
    assert pace.very_late_s(5.0) == 2.0 * (pace.late_s(5.0) or 0.0)


def test_a_rush_is_soon_forgotten() -> None:
    """What was slow five seconds ago keeps nobody away now."""
    pace = FirstTokenLatency()
    for number in range(100):
        pace.first_token("a", 9.0, number / 100)
    assert pace.fastest_s("a", 1.0) == 9.0
    assert pace.fastest_s("a", 6.1) == 0.0


def test_who_was_given_up_counts_as_slow() -> None:
    """A try cancelled for another's answer is a sample too: else hedging would hide what it is for."""
    pace = FirstTokenLatency(late=0.9)
    for number in range(20):
        pace.first_token("a", 0.1, number / 100)
    assert pace.late_s(0.2) == 0.1
    for number in range(20):
        pace.given_up("a", 3.0, 0.2 + number / 100)
    assert pace.late_s(1.0) == 3.0


def test_endpoints_that_went_are_dropped() -> None:
    """Addresses from DNS come and go for months; only those lately heard of are kept."""
    pace = FirstTokenLatency()
    for number in range(1000):
        pace.first_token(f"10.0.0.{number}", 0.1, float(number))
    assert len(pace._endpoints) <= 60  # as many as came in the last minute

from __future__ import annotations

from cloud_pool.dispatch.first_token_latency import FirstTokenLatency


def test_too_few_samples_give_no_threshold() -> None:
    latency = FirstTokenLatency()
    for number in range(7):
        latency.first_token("a", 0.1, float(number) / 10)
    assert latency.hedge_after_s(1.0) is None
    assert latency.fastest_s("a", 1.0) == 0.0
    assert latency.fastest_s("never seen", 1.0) == 0.0


def test_one_slow_endpoint_of_two_does_not_define_late() -> None:
    latency = FirstTokenLatency(quantile=0.95)
    for number in range(100):
        latency.first_token("quick", 0.1, number / 100)
        latency.first_token("slow", 1.0, number / 100)
    assert latency.hedge_after_s(1.0) == 0.1
    assert latency.fastest_s("quick", 1.0) == 0.1
    assert latency.fastest_s("slow", 1.0) == 1.0


def test_one_fast_endpoint_of_three_does_not_define_late() -> None:
    latency = FirstTokenLatency(quantile=0.95)
    for number in range(100):
        latency.first_token("lucky", 0.1, number / 100)
        for address in ("a", "b"):
            latency.first_token(address, 1.0, number / 100)
    assert latency.hedge_after_s(1.0) == 1.0


def test_late_is_a_quantile_of_the_last_minute() -> None:
    latency = FirstTokenLatency(quantile=0.95)
    for number in range(1, 101):
        latency.first_token("a", number / 100, number / 100)
    assert latency.hedge_after_s(1.0) == 0.95
    assert latency.hedge_after_s(62.0) is None


def test_the_urgent_threshold_is_beyond_the_99th_percentile() -> None:
    """At most twice the first threshold."""
    latency = FirstTokenLatency(quantile=0.95)
    assert latency.urgent_hedge_after_s(0.0) is None
    for number in range(50):
        latency.first_token("a", 0.1, number / 100)
    assert latency.urgent_hedge_after_s(0.6) == 0.2
    for number in range(100):
        latency.first_token("a", 0.1 + number / 10_000, 1.0 + number / 100)
    hedge_after_s, urgent_hedge_after_s = latency.hedge_after_s(2.0), latency.urgent_hedge_after_s(2.0)
    assert hedge_after_s is not None
    assert urgent_hedge_after_s is not None
    assert hedge_after_s < urgent_hedge_after_s < 1.2 * hedge_after_s
    for number in range(10):
        latency.abandoned("a", 9.0, 2.0 + number / 100)
    for number in range(180):
        latency.first_token("a", 0.1, 3.0 + number / 100)
    assert latency.urgent_hedge_after_s(5.0) == 2.0 * (latency.hedge_after_s(5.0) or 0.0)


def test_a_slow_rush_is_forgotten_after_five_seconds() -> None:
    latency = FirstTokenLatency()
    for number in range(100):
        latency.first_token("a", 9.0, number / 100)
    assert latency.fastest_s("a", 1.0) == 9.0
    assert latency.fastest_s("a", 6.1) == 0.0


def test_an_abandoned_attempt_is_a_sample() -> None:
    """Otherwise hedging would hide what it is for."""
    latency = FirstTokenLatency(quantile=0.9)
    for number in range(20):
        latency.first_token("a", 0.1, number / 100)
    assert latency.hedge_after_s(0.2) == 0.1
    for number in range(20):
        latency.abandoned("a", 3.0, 0.2 + number / 100)
    assert latency.hedge_after_s(1.0) == 3.0


def test_endpoints_without_recent_samples_are_dropped() -> None:
    latency = FirstTokenLatency()
    for number in range(1000):
        latency.first_token(f"10.0.0.{number}", 0.1, float(number))
    assert len(latency.endpoints) <= 60  # those of the last minute

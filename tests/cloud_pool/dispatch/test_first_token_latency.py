"""What a tier knows about its endpoints' times to first token."""

from __future__ import annotations

from causeway_server.cloud_pool.dispatch.dispatcher import FirstTokenLatency


def test_too_few_samples_exclude_nothing() -> None:
    latency = FirstTokenLatency()
    for number in range(7):
        latency.first_token("a", 0.1, float(number) / 10)
    assert latency.fastest_s("a", 1.0) == 0.0
    assert latency.fastest_s("never seen", 1.0) == 0.0


def test_each_endpoint_has_its_own_time() -> None:
    latency = FirstTokenLatency()
    for number in range(100):
        latency.first_token("quick", 0.1, number / 100)
        latency.first_token("slow", 1.0, number / 100)
    assert latency.fastest_s("quick", 1.0) == 0.1
    assert latency.fastest_s("slow", 1.0) == 1.0


def test_a_slow_rush_is_forgotten_after_five_seconds() -> None:
    latency = FirstTokenLatency()
    for number in range(100):
        latency.first_token("a", 9.0, number / 100)
    assert latency.fastest_s("a", 1.0) == 9.0
    assert latency.fastest_s("a", 6.1) == 0.0


def test_endpoints_without_recent_samples_are_dropped() -> None:
    latency = FirstTokenLatency()
    for number in range(1000):
        latency.first_token(f"10.0.0.{number}", 0.1, float(number))
    assert len(latency.endpoints) <= 6  # those of the last five seconds

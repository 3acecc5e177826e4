"""Positions of callers in the line for a tier's share."""

from __future__ import annotations

from cloud_pool.degradation.tier_health import caller_position


def test_a_device_or_else_a_conversation_has_one_position() -> None:
    assert caller_position("acme", "kiosk", b"a") == caller_position("acme", "kiosk", b"b")
    assert caller_position("acme", "kiosk", b"a") != caller_position("acme", "till", b"a")
    assert caller_position("acme", "kiosk", b"a") != caller_position("other", "kiosk", b"a")
    assert caller_position("acme", "", b"a") == caller_position("other", "", b"a") != caller_position("acme", "", b"b")


def test_positions_are_spread_evenly() -> None:
    positions = [caller_position("acme", f"kiosk-{number}", b"") for number in range(2000)]
    assert all(0.0 <= position < 1.0 for position in positions)
    for share in (0.1, 0.5, 0.9):
        assert abs(sum(position < share for position in positions) / 2000 - share) < 0.04

"""Where callers stand in the line."""

from __future__ import annotations

from cloud_pool.ladder.callers import place_of


def test_a_device_stands_in_one_place() -> None:
    """Whatever it asks; another device, or another tenant's, elsewhere. Nobody's device: each conversation its own."""
    assert place_of("acme", "kiosk", b"a") == place_of("acme", "kiosk", b"b")
    assert place_of("acme", "kiosk", b"a") != place_of("acme", "till", b"a")
    assert place_of("acme", "kiosk", b"a") != place_of("other", "kiosk", b"a")
    assert place_of("acme", "", b"a") == place_of("other", "", b"a") != place_of("acme", "", b"b")


def test_the_line_is_filled_evenly() -> None:
    """Of devices whose names follow each other, a share of them stands before that share."""
    places = [place_of("acme", f"kiosk-{number}", b"") for number in range(2000)]
    assert all(0.0 <= place < 1.0 for place in places)
    for share in (0.1, 0.5, 0.9):
        assert abs(sum(place < share for place in places) / 2000 - share) < 0.04

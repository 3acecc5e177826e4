"""How several gateways divide the places of a tier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.admission.peer_heartbeat import divide_permits


def test_alone_it_has_them_all() -> None:
    """Whatever it asks for."""
    assert divide_permits(16, {"a": 0.0}) == {"a": 16}
    assert divide_permits(16, {"a": 90.0}) == {"a": 16}


def test_equal_gateways_have_equal_parts() -> None:
    """Idle or crowded; what does not go up goes to the first by name."""
    assert divide_permits(16, {"a": 0.0, "b": 0.0}) == {"a": 8, "b": 8}
    assert divide_permits(16, {"a": 70.0, "b": 40.0}) == {"a": 8, "b": 8}
    assert divide_permits(16, {"a": 9.0, "b": 9.0, "c": 9.0}) == {"a": 6, "b": 5, "c": 5}


def test_what_one_does_not_need_the_other_has() -> None:
    """It keeps what it asks for, and half of an equal part at least."""
    assert divide_permits(16, {"a": 6.0, "b": 70.0}) == {"a": 6, "b": 10}
    assert divide_permits(16, {"a": 0.0, "b": 70.0}) == {"a": 4, "b": 12}


def test_more_gateways_than_places() -> None:
    """Each has one: none of them is without."""
    assert divide_permits(2, {"a": 1.0, "b": 1.0, "c": 0.0}) == {"a": 1, "b": 1, "c": 1}


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(0.0, 500.0), min_size=1), st.integers(1, 300)
)
def test_all_places_are_given_and_nobody_is_without(demands: dict[str, float], places: int) -> None:
    """And who asks for more never has less."""
    found = divide_permits(places, demands)
    assert set(found) == set(demands)
    assert min(found.values()) >= 1
    if places >= len(demands):
        assert sum(found.values()) == places
    for one in demands:
        for other in demands:
            if demands[one] > demands[other]:
                assert found[one] >= found[other] - 1

"""How several gateways divide the permits of a tier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.admission.peer_heartbeat import divide_permits


def test_a_single_gateway_has_all_permits() -> None:
    assert divide_permits(16, {"a": 0.0}) == {"a": 16}
    assert divide_permits(16, {"a": 90.0}) == {"a": 16}


def test_equal_gateways_have_equal_parts() -> None:
    assert divide_permits(16, {"a": 0.0, "b": 0.0}) == {"a": 8, "b": 8}
    assert divide_permits(16, {"a": 70.0, "b": 40.0}) == {"a": 8, "b": 8}
    assert divide_permits(16, {"a": 9.0, "b": 9.0, "c": 9.0}) == {"a": 6, "b": 5, "c": 5}


def test_unneeded_permits_go_to_the_other_gateway() -> None:
    assert divide_permits(16, {"a": 6.0, "b": 70.0}) == {"a": 6, "b": 10}
    assert divide_permits(16, {"a": 0.0, "b": 70.0}) == {"a": 4, "b": 12}


def test_with_more_gateways_than_permits_each_has_one() -> None:
    assert divide_permits(2, {"a": 1.0, "b": 1.0, "c": 0.0}) == {"a": 1, "b": 1, "c": 1}


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(0.0, 500.0), min_size=1), st.integers(1, 300)
)
def test_all_permits_are_given_and_more_demand_never_gives_less(demands: dict[str, float], permits: int) -> None:
    found = divide_permits(permits, demands)
    assert set(found) == set(demands)
    assert min(found.values()) >= 1
    if permits >= len(demands):
        assert sum(found.values()) == permits
    for one in demands:
        for other in demands:
            if demands[one] > demands[other]:
                assert found[one] >= found[other] - 1

"""The choice of an endpoint: pure, so that every case can be drawn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.pool.choice import choose
from cloud_pool.pool.settings import PoolConfig
from cloud_pool.pool.state import Endpoint, PoolState

DRAWS = st.floats(0.0, 1.0, exclude_max=True)


def pool(*outstanding: int) -> PoolState:
    return PoolState(tuple(Endpoint(address=f"t{at}:1", open=(0.0,) * load) for at, load in enumerate(outstanding)))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), DRAWS)
def test_the_busiest_is_never_chosen_over_another(loads: list[int], draw: float) -> None:
    """Of two different endpoints the less loaded is taken, so the only busiest one never is."""
    chosen = choose(pool(*loads), PoolConfig(), now=0.0, draw=draw)
    assert chosen is not None
    assert loads.count(max(loads)) > 1 or chosen.outstanding < max(loads)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), DRAWS, st.sets(st.integers(0, 5)))
def test_the_excluded_are_not_chosen(loads: list[int], draw: float, out: set[int]) -> None:
    """An excluded endpoint gets nothing; with all of them excluded nobody does."""
    excluding = {f"t{at}:1" for at in out}
    chosen = choose(pool(*loads), PoolConfig(), now=0.0, draw=draw, excluding=excluding)
    assert (chosen is None) == (set(range(len(loads))) <= out)
    assert chosen is None or chosen.address not in excluding

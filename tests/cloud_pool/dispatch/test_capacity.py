"""How many endpoints take requests."""

from __future__ import annotations

from contextlib import closing

import pytest

from causeway_server.cloud_pool.dispatch.endpoint_selection import Endpoint, PoolCapacity, PoolState, capacity_of
from causeway_server.router.errors import CloudUnreachable

from .scripted_pool import Bed

BUSY = (0.0, 0.0, 0.0)


def capacity(*endpoints: Endpoint) -> PoolCapacity:
    return capacity_of(PoolState(endpoints))


def test_idle_and_busy_endpoints_count_alike() -> None:
    assert capacity(Endpoint(address="a"), Endpoint(address="b", open_since=BUSY)) == PoolCapacity(2)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Endpoint(address="b", phase="ejected", open_since=BUSY), id="ejected"),
        pytest.param(Endpoint(address="b", phase="draining", open_since=BUSY), id="draining"),
        pytest.param(Endpoint(address="b", trust="slow", open_since=BUSY), id="slow"),
        pytest.param(Endpoint(address="b", trust="on_trial", open_since=BUSY), id="on trial"),
    ],
)
def test_endpoints_without_new_requests_count_nothing(other: Endpoint) -> None:
    assert capacity(Endpoint(address="a"), other) == PoolCapacity(1, away=3)


def test_a_tier_that_is_down_has_the_capacity_of_one_endpoint() -> None:
    """Its requests must fail, and not wait."""
    assert capacity(Endpoint(address="a", phase="ejected", open_since=BUSY)) == PoolCapacity(1)
    assert capacity() == PoolCapacity(1)


def test_the_pool_follows_its_endpoints() -> None:
    bed = Bed("t0:1", "t1:1", "t2:1")
    assert bed.pool.capacity == PoolCapacity(3)
    with closing(bed.pool.lease()) as lease:
        lease.failed(CloudUnreachable("refused", phase="connect"))
        assert bed.pool.capacity == PoolCapacity(2, away=1)
    assert bed.pool.capacity == PoolCapacity(2)
    bed.pool.set_endpoints({"t1:1": ""})
    assert bed.pool.capacity == PoolCapacity(1)

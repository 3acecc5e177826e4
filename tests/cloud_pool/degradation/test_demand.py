from __future__ import annotations

import math

import pytest

from causeway_server.cloud_pool.degradation.tier_health import MEMORY_S, ArrivalRate, fitting_share


def test_the_arrival_rate_forgets_within_seconds() -> None:
    rate = ArrivalRate()
    assert rate.per_s(0.0) == 0.0
    for n in range(200):
        rate.add(n / 20.0)
    assert rate.per_s(10.0) == pytest.approx(20.0, rel=0.05)
    assert rate.per_s(10.0 + 4 * MEMORY_S) < 0.5


def test_the_fitting_share_follows_littles_law() -> None:
    assert fitting_share(10.0, 0.5, running=4, limit=10) == 1.0
    assert fitting_share(10.0, 0.5, running=8, limit=10) == 0.2
    assert fitting_share(10.0, 0.5, running=9, limit=10) == fitting_share(10.0, 0.5, running=12, limit=10) == 0.0
    assert fitting_share(1.0, 0.5, running=4, limit=10) == 10.0


def test_where_nothing_is_known_everything_fits() -> None:
    assert fitting_share(0.0, 0.5, running=9, limit=10) == math.inf
    assert fitting_share(10.0, None, running=9, limit=10) == math.inf

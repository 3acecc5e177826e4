"""Hypothesis profiles and the markers of services.

`make test` draws the same examples on every run; `make fuzz` draws new ones until Ctrl-C. No profile has a deadline: on
a busy machine the time of one example says nothing. The models of this account's folder are not seen by the tests.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("fuzz", derandomize=False, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile("repeatable")

os.environ["XDG_DATA_HOME"] = os.devnull

# Fixtures that start a service, and the marker of every test that uses one of them.
_SERVICES = {"redis_server": "redis", "jobs_redis": "redis", "triton_environment": "triton"}


def pytest_itemcollected(item: pytest.Item) -> None:
    fixtures = item.fixturenames if isinstance(item, pytest.Function) else ()
    for marker in {_SERVICES[name] for name in fixtures if name in _SERVICES}:
        item.add_marker(marker)

"""Hypothesis profiles: `make test` draws the same examples on every run; `make fuzz` draws new ones until Ctrl-C.

No profile has a deadline: on a busy machine the time of one example says nothing. The models of this account's folder
are not seen by the tests.
"""

import os

from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("fuzz", derandomize=False, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile("repeatable")

os.environ["XDG_DATA_HOME"] = os.devnull

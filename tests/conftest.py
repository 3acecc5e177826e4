"""Hypothesis profiles, the markers of services, and what needs the engine's bindings.

`make test` draws the same examples on every run; `make fuzz` draws new ones until Ctrl-C. No profile has a deadline: on
a busy machine the time of one example says nothing. The models of this account's folder are not seen by the tests,
and gateways and Triton keep their tokens and keys in a folder of the run.
"""

import importlib.util
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=20)
settings.register_profile("fuzz", derandomize=False, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile("repeatable")

# Compiled modules are kept, whatever the shell says: else each of some thousand processes compiles all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The suite runs several processes on each core: threads that spin for others cost numpy tens of times its work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["XDG_DATA_HOME"] = os.devnull
# Child processes import workers and scripted parts of the tests by their names.
_paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_paths)
_state_home = tempfile.TemporaryDirectory(prefix="causeway-tests-")  # removed when the run ends
os.environ["XDG_STATE_HOME"] = _state_home.name

if importlib.util.find_spec("llama_cpp") is None:  # `make quick` compiles nothing
    collect_ignore = [
        "cloud_pool/http/test_failures.py",
        "cloud_pool/http/test_gateway.py",
        "cloud_pool/triton_server/test_model_runtime.py",
        "models/llama_cpp",
        "models/signals/test_calibration.py",
        "models/signals/test_quality.py",
    ]

# Fixtures that start a service, and the marker of every test that uses one of them.
_SERVICES = {
    "redis_server": "redis",
    "jobs_redis": "redis",
    "triton_environment": "triton",
    "nats_server": "nats",
    "kafka_server": "kafka",
    "mosquitto": "mosquitto",
    "postgres_server": "postgres",
    "chromium": "chromium",
}


_SLOW_MODULE = re.compile(rf"^pytestmark = .*\b(slow|engine|{'|'.join(sorted({*_SERVICES.values()}))})\b", re.MULTILINE)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A command that a test runs in this process sets the level of our loggers; the next test has its own."""
    yield
    logging.getLogger("causeway_server").setLevel(logging.NOTSET)


def pytest_configure() -> None:
    """End on SIGTERM (of `timeout`, say) as on Ctrl-C: fixtures stop the servers that they started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module that is slow as a whole for `make quick`, which spends a third of its time on imports."""
    if not config.option.markexpr.startswith("not (") or not collection_path.match("test_*.py"):
        return None
    return True if _SLOW_MODULE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    fixtures = item.fixturenames if isinstance(item, pytest.Function) else ()
    for marker in {_SERVICES[name] for name in fixtures if name in _SERVICES}:
        item.add_marker(marker)

"""The daemon on the device and its command line.

Read `serving/service.py` first: its docstring is the table of hops of one request. `app.py` wires everything; A request
passes through `http/`, `serving/` and `backends/`; `storage/`, `signals/` and `observability/` hold the state that it
reads and writes. Requests also come from `jobs/` (an outbox), `sessions.py` (live sessions) and `mqtt/`; `parts/`
serves audio requests. `daemon/` is start and stop, `config/` the settings, `cli/` the commands, `agent/` installs a
fleet's bundles, `console/` is the page at `/console`.
"""

from __future__ import annotations


def daemon_version() -> str:
    """Return the installed version; 0.0.0 if the package is not installed, as in a source tree."""
    from importlib.metadata import PackageNotFoundError, version  # on demand: it takes a start 10 ms

    try:
        return version("causeway-router")
    except PackageNotFoundError:
        return "0.0.0"

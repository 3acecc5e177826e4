"""The version of this daemon, which bundles, the control plane and `--version` name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def daemon_version() -> str:
    """Return the installed version; 0.0.0 if the package is not installed, as in a source tree."""
    try:
        return version("causeway")
    except PackageNotFoundError:
        return "0.0.0"

"""Programs from the distribution's packages: Redis for jobs and the cache; PostgreSQL, Chromium, NATS and mosquitto for
tests.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .places import Places
from .progress import Progress, StepFailed
from .triton import apt_install

POSTGRES_ADVICE = (
    "apt-get install postgresql (Debian, Ubuntu), dnf install postgresql-server (Fedora). "
    "Or go on without: CAUSEWAY_SKIP=postgres make ..."
)
_DEBIAN_POSTGRES = Path("/usr/lib/postgresql")  # its programs are not on PATH
_CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_postgres() -> Path | None:
    """Return the folder with the newest PostgreSQL's initdb and pg_ctl, or None."""
    newest = max(_DEBIAN_POSTGRES.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]), default=None)
    found = str(newest) if newest else shutil.which("initdb")
    return None if found is None else Path(found).parent


def find_chromium() -> str | None:
    """Return the path of the Chromium on PATH; None if there is none."""
    return next((path for name in _CHROMIUM_NAMES if (path := shutil.which(name)) is not None), None)


def find_redis() -> str | None:
    """Return the path of the redis-server on PATH; None if there is none."""
    return shutil.which("redis-server")


def find_nats() -> str | None:
    """Return the path of the nats-server on PATH; None if there is none."""
    return shutil.which("nats-server")


def find_mosquitto() -> str | None:
    """Return the path of mosquitto, which Debian keeps off an ordinary account's PATH; None if there is none."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def install_redis(places: Places, progress: Progress) -> str:
    """Uses the redis-server on PATH, or as root installs it. Raises StepFailed, saying what to install by hand."""
    advice = (
        "apt-get install redis-server (Debian, Ubuntu), dnf install redis (Fedora). "
        "Or go on without: CAUSEWAY_SKIP=redis make ..."
    )
    return _install("redis-server", "redis-server", find_redis, advice, places, progress)


def install_postgres(places: Places, progress: Progress) -> str:
    """Uses the PostgreSQL that is there, or as root installs it. Raises StepFailed, saying what to install by hand."""
    return _install("PostgreSQL", "postgresql", find_postgres, POSTGRES_ADVICE, places, progress)


def install_chromium(places: Places, progress: Progress) -> str:
    """Uses the Chromium on PATH, or as root installs it. Raises StepFailed, saying what to install by hand."""
    advice = (
        "apt-get install chromium (Debian), chromium-browser (Ubuntu), dnf install chromium (Fedora). "
        "Or go on without: CAUSEWAY_SKIP=chromium make ..."
    )
    return _install("Chromium", "chromium", find_chromium, advice, places, progress)


def install_nats(places: Places, progress: Progress) -> str:
    """Uses the nats-server on PATH, or as root installs it. Raises StepFailed, saying what to install by hand."""
    advice = "apt-get install nats-server (Debian, Ubuntu). Or go on without: CAUSEWAY_SKIP=nats make ..."
    return _install("nats-server", "nats-server", find_nats, advice, places, progress)


def install_mosquitto(places: Places, progress: Progress) -> str:
    """Uses the mosquitto that is there, or as root installs it. Raises StepFailed, saying what to install by hand."""
    advice = (
        "apt-get install mosquitto (Debian, Ubuntu), dnf install mosquitto (Fedora). "
        "Or go on without: CAUSEWAY_SKIP=mosquitto make ..."
    )
    return _install("mosquitto", "mosquitto", find_mosquitto, advice, places, progress)


def _install(
    title: str, package: str, find: Callable[[], object], advice: str, places: Places, progress: Progress
) -> str:
    if find() is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise StepFailed(f"{title} is not installed", advice)
        apt_install(places, package, progress)
    if find() is None:
        raise StepFailed(f"the package {package} brought no {title}", f"Install {title} by hand.")
    return title

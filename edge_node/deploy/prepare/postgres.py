"""PostgreSQL, from the distribution's packages: tests run the control plane on it beside SQLite."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .places import Places
from .progress import Progress, StepFailed
from .triton import apt_install

ADVICE = (
    "apt-get install postgresql (Debian, Ubuntu), dnf install postgresql-server (Fedora). "
    "Or go on without: CAUSEWAY_SKIP=postgres make ..."
)
_DEBIAN = Path("/usr/lib/postgresql")  # its programs are not on PATH


def find_postgres() -> Path | None:
    """Return the folder with the newest PostgreSQL's initdb and pg_ctl, or None."""
    newest = max(_DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]), default=None)
    found = str(newest) if newest else shutil.which("initdb")
    return None if found is None else Path(found).parent


def install_postgres(places: Places, progress: Progress) -> str:
    """Uses the PostgreSQL that is there, or as root installs it. Raises StepFailed, saying what to install by hand."""
    if find_postgres() is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise StepFailed("PostgreSQL is not installed", ADVICE)
        apt_install(places, "postgresql", progress)
    if find_postgres() is None:
        raise StepFailed("the package postgresql brought no initdb", "Install PostgreSQL by hand.")
    return "PostgreSQL"

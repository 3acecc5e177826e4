"""redis-server, from the distribution's packages: the cloud side's jobs and shared cache live in it."""

from __future__ import annotations

import os
import shutil

from .places import Places
from .progress import Progress, StepFailed
from .triton import apt_install


def install_redis(places: Places, progress: Progress) -> str:
    """Uses the redis-server on PATH, or as root installs it. Raises StepFailed, saying what to install by hand."""
    if shutil.which("redis-server") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise StepFailed(
                "redis-server is not installed",
                "apt-get install redis-server (Debian, Ubuntu), dnf install redis (Fedora). "
                "Or go on without: CAUSEWAY_SKIP=redis make ...",
            )
        apt_install(places, "redis-server", progress)
    if shutil.which("redis-server") is None:
        raise StepFailed("the package redis-server brought no redis-server", "Install Redis by hand.")
    return "redis-server"

"""Chromium, from the distribution's packages: the tests of the consoles drive it."""

from __future__ import annotations

import os
import shutil

from .places import Places
from .progress import Progress, StepFailed
from .triton import apt_install

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Return the path of the Chromium on PATH; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


def install_chromium(places: Places, progress: Progress) -> str:
    """Uses the Chromium on PATH, or as root installs it. Raises StepFailed, saying what to install by hand."""
    if find_chromium() is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise StepFailed(
                "Chromium is not installed",
                "apt-get install chromium (Debian), chromium-browser (Ubuntu), dnf install chromium (Fedora). "
                "Or go on without: CAUSEWAY_SKIP=chromium make ...",
            )
        apt_install(places, "chromium", progress)
    if find_chromium() is None:
        raise StepFailed("the package chromium brought no chromium", "Install Chromium by hand.")
    return "chromium"

"""Programs from the distribution's packages: Redis for jobs and the cache; the others for tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .places import Places
from .progress import Progress, StepFailed
from .triton import apt_install

_DEBIAN_POSTGRES = Path("/usr/lib/postgresql")  # its programs are not on PATH
_SYSTEM = ("/usr/sbin", "/usr/local/sbin")  # Debian keeps mosquitto off an ordinary account's PATH


class Package(NamedTuple):
    """A package of the distribution.

    `name`: as $CAUSEWAY_SKIP has it; `package`: as Debian has it; `programs`: the names that its program may have;
    `by_hand`: the commands that install it.
    """

    name: str
    package: str
    title: str
    programs: Sequence[str]
    by_hand: str

    @property
    def advice(self) -> str:
        """What to do without the program."""
        return f"{self.by_hand}. Or go on without: CAUSEWAY_SKIP={self.name} make ..."

    def find(self) -> str | None:
        """Return the path of the program, of PostgreSQL's the newest version; None if there is none."""
        newest_first = sorted(_DEBIAN_POSTGRES.glob("*/bin"), key=lambda path: int(path.parts[-2]), reverse=True)
        path = os.pathsep.join([*map(str, newest_first), *os.get_exec_path(), *_SYSTEM])
        return next((found for name in self.programs if (found := shutil.which(name, path=path)) is not None), None)

    def install(self, places: Places, progress: Progress) -> str:
        """Use the program that is there, or as root install it. Raises StepFailed, saying what to install by hand."""
        if self.find() is None:
            if os.geteuid() != 0 or shutil.which("apt-get") is None:
                raise StepFailed(f"{self.title} is not installed", self.advice)
            apt_install(places, self.package, progress)
        if self.find() is None:
            raise StepFailed(f"the package {self.package} brought no {self.title}", f"Install {self.title} by hand.")
        return self.title


REDIS = Package(
    "redis",
    "redis-server",
    "redis-server",
    ["redis-server"],
    "apt-get install redis-server (Debian, Ubuntu), dnf install redis (Fedora)",
)
NATS = Package("nats", "nats-server", "nats-server", ["nats-server"], "apt-get install nats-server (Debian, Ubuntu)")
MOSQUITTO = Package(
    "mosquitto",
    "mosquitto",
    "mosquitto",
    ["mosquitto"],
    "apt-get install mosquitto (Debian, Ubuntu), dnf install mosquitto (Fedora)",
)
POSTGRES = Package(
    "postgres",
    "postgresql",
    "PostgreSQL",
    ["initdb"],
    "apt-get install postgresql (Debian, Ubuntu), dnf install postgresql-server (Fedora)",
)
CHROMIUM = Package(
    "chromium",
    "chromium",
    "Chromium",
    ["chromium", "chromium-browser", "google-chrome"],
    "apt-get install chromium (Debian), chromium-browser (Ubuntu), dnf install chromium (Fedora)",
)
PACKAGES = (REDIS, NATS, MOSQUITTO, POSTGRES, CHROMIUM)

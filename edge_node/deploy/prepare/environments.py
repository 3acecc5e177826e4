"""The virtual environments and what pip puts into them, exactly as the lock files say."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from .places import Places, child_environment, is_made_here, require_venv
from .progress import Progress, Watch, run

NETWORK_ADVICE = (
    "Is the network up? pip's own settings are honoured (pip config, PIP_INDEX_URL, PIP_CERT). "
    "The same command carries on from here."
)


def make_environment(places: Places, folder: Path, progress: Progress) -> str:
    """Makes a virtual environment, or makes one whole again that was left half-made."""
    require_venv()
    fits = is_made_here(folder) and (folder / "bin" / "python").resolve() == places.python.resolve()
    if folder.exists() and not fits:
        shutil.rmtree(folder)
    run(
        [places.python, "-m", "venv", folder],
        log=places.logs / f"environment{folder.name}.log",
        environ=child_environment(os.environ),
        progress=progress,
        advice=f"Remove {folder} and try again.",
    )
    return f"Python environment {folder.name}"


def install_locked(
    places: Places, python: Path, lock: Path, progress: Progress, *, with_dependencies: bool = True
) -> int:
    """Installs a lock file, hashes checked, and returns how many packages it names. Raises StepFailed."""
    total = len(locked_names(lock))
    words = [] if with_dependencies else ["--no-deps"]
    run(
        [python, "-m", "pip", "install", "--require-hashes", "--progress-bar=off", *words, "-r", lock],
        log=places.logs / f"{lock.stem}.log",
        environ=child_environment(os.environ),
        watch=package_counter(total),
        progress=progress,
        advice=NETWORK_ADVICE,
    )
    return total


def locked_names(lock: Path) -> list[str]:
    """The packages that a lock file names."""
    return sorted(set(re.findall(r"^([A-Za-z0-9_.-]+)==", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)))


def package_counter(total: int) -> Watch:
    """Turns pip's chatter into `12/58 packages: aiohttp`."""
    seen: set[str] = set()

    def watch(line: str) -> str | None:
        found = re.match(r"\s*(?:Collecting|Requirement already satisfied:) ([A-Za-z0-9_.-]+)", line)
        if found:
            seen.add(found.group(1))
            return f"{min(len(seen), total)}/{total} packages: {found.group(1)}"
        return f"installing {total} packages" if line.startswith("Installing collected") else None

    return watch

"""An environment of its own for another server, with pinned packages; made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make_environment(name: str, lock: Path) -> Path:
    """Create the environment `name` in the checkout unless it holds just this.

    Args:
        name: of its folder.
        lock: pinned packages.

    Returns:
        The folder of its commands.
    """
    folder = ROOT / name
    stamp = folder / "installed"
    wanted = lock.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        pip = folder / "bin" / "pip"
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([pip, "install", "--quiet", "--requirement", lock], check=True)
        stamp.write_text(wanted)
    return folder / "bin"

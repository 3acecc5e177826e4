"""Tolerant reads of sysfs and procfs files: a sensor may be gone, powered down or return garbage."""

from __future__ import annotations

import math
from pathlib import Path

_READ_BYTES = 16 * 1024


def read_text(path: Path) -> str | None:
    """Return the file's text without the newline, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_READ_BYTES).decode("ascii", "replace").strip("\x00 \t\r\n")
    except OSError:  # a sensor that is powered down answers EAGAIN, EIO or ENODEV
        return None


def read_number(path: Path) -> float | None:
    """Return the finite number in the file, or None."""
    text = read_text(path)
    try:
        number = float(text) if text else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def list_dir(path: Path, pattern: str) -> list[Path]:
    """Return the sorted matches of `pattern` below `path`; an empty list if it cannot be listed."""
    try:
        return sorted(path.glob(pattern))
    except OSError:
        return []

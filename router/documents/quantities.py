"""Durations and sizes as people write them: ``500ms``, ``30s``, ``10m``, ``7d``; ``64MiB``, ``1GB``."""

from __future__ import annotations

import re

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
# As in systemd, K, M and G are powers of 1024; KB, MB and GB are powers of 1000.
_BYTES = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b?)", re.IGNORECASE)


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration, or None if the text is not one."""
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def bytes_of(text: str) -> int | None:
    """Return the bytes of a size, or None if the text is not one."""
    match = _SIZE.fullmatch(text.strip())
    factor = _BYTES.get(match[2].lower()) if match else None
    return int(float(match[1]) * factor) if match and factor else None

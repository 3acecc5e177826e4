"""Numbers written as text: whole numbers in queries, headers and form fields; durations and sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from .errors import InvalidRequest

T = TypeVar("T")

MAX_PAGE = 100
"""The maximum number of objects on a page of a list."""
_MAX_ID = 80  # characters of the id `after`


def whole_number(text: str, most: int) -> int | None:
    """Return a whole number from 0 to `most`, or None for any other text. Python's `int` takes digits of every script,
    signs and underscores, and raises ValueError from 4,300 digits on.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if number <= most else None


def read_page(query: Mapping[str, str]) -> tuple[int, str]:
    """Return `limit`, 1 to MAX_PAGE, and the id `after` from the query of a list. Raises InvalidRequest."""
    text = query.get("limit", "20")
    limit = whole_number(text, MAX_PAGE)
    if not limit:
        raise InvalidRequest(f"`limit` must be a number from 1 to {MAX_PAGE}, not {text[:32]!r}.", param="limit")
    return limit, query.get("after", "")[:_MAX_ID]


_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(ms|s|m|h|d)")
# K, M and G are powers of 1024, as in systemd; KB, MB and GB are powers of 1000.
_BYTES = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKmMgG]?[iI]?[bB]?)")


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration, or None if the text is not one."""
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def bytes_of(text: str) -> int | None:
    """Return the bytes of a size, or None if the text is not one."""
    match = _SIZE.fullmatch(text.strip())
    factor = _BYTES.get(match[2].lower()) if match else None
    return int(float(match[1]) * factor) if match and factor else None


def unit_pattern(key: str) -> str | None:
    """Return the pattern of text that a key accepts for a number, or None: a key that ends in `_s` is a duration, one
    in `_bytes` a size; `_per_s` is a rate.
    """
    if key.endswith("_bytes"):
        return f"^{_SIZE.pattern}$"
    return f"^{_DURATION.pattern}$" if key.endswith("_s") and not key.endswith("_per_s") else None


def without_unit(key: str, value: T) -> T | float:
    """Return the number of a duration (`30s`) or a size (`64MiB`) for its key; any other value as it is."""
    if not isinstance(value, str) or unit_pattern(key) is None:
        return value
    number = bytes_of(value) if key.endswith("_bytes") else seconds_of(value)
    return value if number is None else number


def with_unit(key: str, number: float) -> str:
    """Return a key's number as people write it: `35d`, `1.5s` or `8MiB`, in the largest unit that divides it."""
    text = f"{number:g}" if number != int(number) else str(int(number))
    if not number or unit_pattern(key) is None:
        return text
    if key.endswith("_bytes"):
        units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    else:
        units = {"d": 86400, "h": 3600, "m": 60}
        text = f"{text}s" if number >= 1 else f"{number * 1000:g}ms"
    return next((f"{int(number // size)}{unit}" for unit, size in units.items() if number % size == 0), text)

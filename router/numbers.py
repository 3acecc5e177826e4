"""Whole numbers that callers send as text, in queries, headers and form fields."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import InvalidRequest

MAX_PAGE = 100
"""The most objects of one page of a list."""
_MAX_ID = 80  # characters of an id that is looked for


def whole_number(text: str, most: int) -> int | None:
    """Return a whole number from 0 to `most`, or None for any other text.

    Python's `int` takes digits of every script, signs and underscores, and raises ValueError from 4,300 digits on.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if number <= most else None


def read_page(query: Mapping[str, str]) -> tuple[int, str]:
    """Return `limit`, 1 to MAX_PAGE, and the id `after` of the query of a list. Raises InvalidRequest."""
    text = query.get("limit", "20")
    limit = whole_number(text, MAX_PAGE)
    if not limit:
        raise InvalidRequest(f"`limit` must be a number from 1 to {MAX_PAGE}, not {text[:32]!r}", param="limit")
    return limit, query.get("after", "")[:_MAX_ID]
